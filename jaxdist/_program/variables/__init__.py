"""Variables that a step reads and assigns."""
