"""What a collective may be told: the reduce op, hints, dtypes."""
