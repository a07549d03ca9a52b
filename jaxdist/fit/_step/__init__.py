"""The computation of one step, and the runners of steps."""
