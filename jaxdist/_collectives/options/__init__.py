"""The options of a collective: the reduce op, hints, dtypes."""
