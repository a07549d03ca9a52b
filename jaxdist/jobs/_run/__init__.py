"""A run of a job: checkpoints, training, evaluation, progress, and files."""
