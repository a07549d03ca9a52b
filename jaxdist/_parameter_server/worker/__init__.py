"""The worker: runs closures with variables of the servers."""
