"""Reducing and gathering values of all replicas from outside a step."""
