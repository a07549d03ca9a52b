"""Datasets over several processes: the part that each reads, and their agreement on rows."""
