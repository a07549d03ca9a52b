"""Steps whose replicas have different shapes: several traces joined into one program."""
