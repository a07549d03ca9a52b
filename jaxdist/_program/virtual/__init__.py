"""Steps with `deterministic=True`: several virtual replicas run on each device."""
