"""`SlurmClusterResolver`: reads the tasks of a Slurm step from the environment."""

from jaxdist.cluster_resolver._slurm.resolver import SlurmClusterResolver as SlurmClusterResolver
