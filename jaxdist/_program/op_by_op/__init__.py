"""The executor of `run_eagerly`: one thread for each replica, one operation after the other."""
