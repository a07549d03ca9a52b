"""`Process`: one process of a job."""

import dataclasses

import jax

from jaxdist._called import call_as, called
from jaxdist._compat import get_process_numbers
from jaxdist._validate import as_integer


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of a job.

    Code that depends on the process (`ReplicaMesh.local_replicas`, the rows that a dataset reads)
    gets it as this object. So one process can compute what each process of a job would compute.

    Args:
        index: Number of the process, from 0.
        count: Number of processes of the job.

    Raises:
        ArgumentTypeError: `index` or `count` is not an integer.
        ArgumentError: `count` is below 1, or `index` is not between 0 and `count - 1`.

    Example:
        >>> from jaxdist._processes import Process
        >>> Process(2, 4)
        Process(index=2, count=4)
        >>> Process(0, 4).is_first
        True

    Source:
        `jax.process_index` and `jax.process_count`.
    """

    index: int
    count: int

    @called(lambda self: f"Process(count={self.count})")
    def __post_init__(self) -> None:
        call_as("Process", as_integer, "count", self.count, least=1)
        as_integer("index", self.index, least=0, most=self.count - 1)

    @property
    def is_first(self) -> bool:
        """Whether this process writes what only one process may write."""
        return self.index == 0


def get_current_process() -> Process:
    """Return the process in which this is called.

    Cost:
        Starts JAX's backend, so the processes must join before. Later calls take some microseconds.

    Example:
        >>> from jaxdist._processes import get_current_process
        >>> get_current_process()
        Process(index=0, count=1)
    """
    return Process(jax.process_index(), jax.process_count())


def get_process_of_job() -> Process | None:
    """Return this process as a process of the job that it has joined; None without a job.

    Does not start JAX's backend.
    """
    numbers = get_process_numbers()
    return None if numbers is None else Process(*numbers)
