"""Training steps of MaxText and of jaxdist, compiled for the same slices: `make maxtext`."""
