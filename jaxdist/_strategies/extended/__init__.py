"""`StrategyExtended`, and the documented methods of version 1 of `tf.distribute`."""
