"""`reduce`, `gather` and local results, outside a step and in merge functions."""
