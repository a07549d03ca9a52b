"""Marks that a trace carries, and notes about the trace."""
