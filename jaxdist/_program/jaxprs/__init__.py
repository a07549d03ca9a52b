"""Interpreters and analyses of JAX programs, and tables of JAX's primitives."""
