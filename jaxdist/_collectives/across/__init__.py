"""Reduce and gather of the values of all replicas, outside of a step."""
