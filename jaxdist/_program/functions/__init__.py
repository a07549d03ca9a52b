"""`jaxdist.function`: a function that JAX compiles as a whole, with its variables."""
