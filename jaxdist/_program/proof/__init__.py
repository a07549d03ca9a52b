"""What can be proved from a traced program, operation by operation."""
