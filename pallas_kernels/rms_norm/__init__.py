"""A residual sum and its RMS norm in one pass over the rows."""
