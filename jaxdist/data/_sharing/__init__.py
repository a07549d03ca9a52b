"""Datasets over several processes: what each process reads, and how the processes agree on it."""
