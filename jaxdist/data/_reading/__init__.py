"""Reading datasets element by element, and batches of arrays in memory."""
