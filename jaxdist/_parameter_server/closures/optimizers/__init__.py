"""Optimizers on the servers: how an optax transformation is cut, and how it gets there."""
