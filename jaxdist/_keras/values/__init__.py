"""Places the values of variables and batches of Keras."""
