"""A value that stays on the devices of a strategy and can be assigned."""
