"""Asynchronous training: variables on servers, and workers that are not in step."""
