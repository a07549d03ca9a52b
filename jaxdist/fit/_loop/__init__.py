"""Epochs, batches, and what is shown of them."""
