"""A step traced once, as one replica sees it."""
