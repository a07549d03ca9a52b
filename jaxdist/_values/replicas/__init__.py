"""`PerReplica`, and the kind and placement of each value."""
