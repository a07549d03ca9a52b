"""Flax NNX objects as arguments and in closures."""
