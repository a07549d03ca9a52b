"""From a trace to a compiled program."""
