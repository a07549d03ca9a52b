"""The strategy of a configuration: one section `[strategy]` for all tasks."""
