"""Checkpoints of several processes: agreement about them, and one that a survivor writes alone."""
