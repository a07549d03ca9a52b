"""JAX's primitives and the programs inside them."""
