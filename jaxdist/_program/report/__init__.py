"""Compares what a compiled program communicates with what the step requested."""
