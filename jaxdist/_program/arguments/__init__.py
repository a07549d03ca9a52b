"""What a call brings: traced leaves, static values, options."""
