"""Sums of many leaves: packed, by size, compressed, in a fixed order."""
