"""The program of a step: how it is built, compiled and called."""
