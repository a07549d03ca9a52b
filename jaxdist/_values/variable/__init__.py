"""`Variable`: a value on the devices of a strategy that can be assigned."""
