"""`SlurmClusterResolver`, and how the environment of a Slurm step is read."""

from jaxdist.cluster_resolver._slurm.resolver import SlurmClusterResolver as SlurmClusterResolver
