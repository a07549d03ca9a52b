"""The arguments of one call: traced leaves, static values, options."""
