"""Sums of many leaves: packed, chosen by size, compressed, or in a fixed order."""
