"""The trace of a step, as one replica runs it."""
