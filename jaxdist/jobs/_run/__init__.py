"""One run of a job, from its checkpoint to its files."""
