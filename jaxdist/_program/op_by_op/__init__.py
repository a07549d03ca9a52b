"""The second executor: one thread for each replica, one operation after the other."""
