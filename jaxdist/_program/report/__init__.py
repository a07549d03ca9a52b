"""What a compiled program communicates, against what was asked for."""
