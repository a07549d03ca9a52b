"""`Sharded`: one array of which each replica holds a piece."""
