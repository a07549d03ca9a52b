"""`jaxdist launch`: starts a job on this machine, or prints a file that starts it on a cluster."""
