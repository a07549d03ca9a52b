"""What runs at the beginning and end of epochs and batches."""
