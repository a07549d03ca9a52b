"""Runs the processes of a job on the nodes of a Ray cluster."""

from jaxdist._launching.on_ray.cluster import connect_to_ray as connect_to_ray
