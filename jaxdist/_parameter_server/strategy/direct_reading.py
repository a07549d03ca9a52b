"""Distributed datasets of a `ParameterServerStrategy`: only workers read them."""

from jaxdist._parameter_server.coordinator import is_on_worker
from jaxdist.errors import InputContextError


def check_on_worker() -> None:
    """Raise an error if the next batch of a distributed dataset is read by the coordinator.

    Raises:
        InputContextError: No worker reads it.
    """
    if is_on_worker():
        return
    raise InputContextError(
        "next() of a distributed dataset of a ParameterServerStrategy was called on the "
        "coordinator.\n\n"
        "Workers read batches: each one has a dataset of its own.\n\n"
        "Pass the dataset, or a function that makes it, to "
        "ClusterCoordinator.create_per_worker_dataset, and schedule a function with its iterator."
    )
