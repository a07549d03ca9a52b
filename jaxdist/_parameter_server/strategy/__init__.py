"""`ParameterServerStrategy`, of version 2 and of version 1."""
