"""Logical devices: the placement of operations on the devices of one replica."""
