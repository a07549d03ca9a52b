"""Variables that a step reads and assigns while it is traced."""
