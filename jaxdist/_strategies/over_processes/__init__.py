"""Strategies in jobs of several processes: checks, reports of what a call does, time limits."""
