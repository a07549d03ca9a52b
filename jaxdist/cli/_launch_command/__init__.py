"""`jaxdist launch`: the processes or tasks of a job here, and files that start it on a cluster."""
