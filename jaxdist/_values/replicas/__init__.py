"""One value for each replica, and which kind of value an array is."""
