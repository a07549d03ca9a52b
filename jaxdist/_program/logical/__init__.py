"""Logical devices of a replica: which operation runs on which."""
