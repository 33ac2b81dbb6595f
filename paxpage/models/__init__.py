"""Model families as Flax NNX modules, the protocol they meet, and how weights are loaded."""
