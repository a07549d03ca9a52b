"""Closures: functions that are traced once, and run on workers."""
