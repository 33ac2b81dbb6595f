"""Rotating queries and keys, and writing keys and values to their slots, in one pass."""
