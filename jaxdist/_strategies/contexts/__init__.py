"""Scopes of strategies, and the context in which their methods may be called."""
