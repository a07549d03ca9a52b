"""`Strategy.run`: from a call to the program that it executes."""
