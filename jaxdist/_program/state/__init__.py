"""Checks of a traced step's state: which values differ, which return, which replicas have rows."""
