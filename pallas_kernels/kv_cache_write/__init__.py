"""Writing new keys and values to their slots."""
