"""Makes the strategy of a configuration from the section `[strategy]`, which all tasks share."""
