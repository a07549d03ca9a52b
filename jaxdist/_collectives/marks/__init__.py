"""Primitives that jaxdist adds to a trace, and notes about the trace."""
