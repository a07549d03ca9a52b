"""Strategies in jobs of several processes: checks, reports of calls, and time limits."""
