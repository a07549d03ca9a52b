"""Attention whose positions are divided over the devices of a replica."""
