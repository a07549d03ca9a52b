"""Callbacks: code that runs at the beginning and end of epochs and batches."""
