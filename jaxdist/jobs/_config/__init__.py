"""Configurations: TOML files are read into frozen dataclasses and checked."""
