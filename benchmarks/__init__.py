"""One file per claim about speed and size; `python -m benchmarks` prints a line for each."""
