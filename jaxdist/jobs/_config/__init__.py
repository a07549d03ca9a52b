"""TOML files into frozen dataclasses: schema, sources, checks."""
