"""The loops over epochs and batches, and their progress."""
