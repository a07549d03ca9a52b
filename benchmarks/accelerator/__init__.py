"""What only an accelerator can show, on one GPU or TPU: `python -m benchmarks.accelerator`."""
