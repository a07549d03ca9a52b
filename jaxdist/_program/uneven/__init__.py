"""Steps whose replicas bring different shapes: several traces joined into one program."""
