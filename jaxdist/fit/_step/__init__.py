"""What one step computes, and how steps run."""
