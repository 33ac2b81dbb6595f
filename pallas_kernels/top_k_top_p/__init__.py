"""Drawing a token from what top_k and top_p leave of a row, without sorting it."""
