"""`StrategyExtended`, and what version 1 of `tf.distribute` documents."""
