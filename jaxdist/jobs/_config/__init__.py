"""Configurations: reads TOML files into frozen dataclasses, and checks them."""
