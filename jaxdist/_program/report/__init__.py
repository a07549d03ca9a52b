"""What a compiled program communicates, compared with what the step asked for."""
