"""Expands the lists that Slurm writes: `a[1-3,5],b` for hosts, `3(x2),1` for tasks per host."""

import itertools
import re
from collections.abc import Iterator

from jaxdist.errors import ClusterError

_MOST_HOSTS = 1_000_000


def expand_hosts(variable: str, text: str) -> list[str]:
    """Return the hosts of a list in the order of Slurm; numbers keep their leading zeros.

    Args:
        variable: Name of the variable, for errors.
        text: Value of the variable.

    Raises:
        ClusterError: The value is not a list of hosts.

    Example:
        >>> from jaxdist.cluster_resolver._slurm.lists import expand_hosts
        >>> expand_hosts("SLURM_STEP_NODELIST", "a[1-2,05]b[0-1],c")
        ['a1b0', 'a1b1', 'a2b0', 'a2b1', 'a05b0', 'a05b1', 'c']
    """
    hosts: list[str] = []
    # Commas inside brackets are part of a range.
    for part in re.split(r",(?![^\[\]]*\])", text.strip()):
        # Prefix, range, prefix, range, ...: every second piece was in brackets.
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if not part or any(re.search(r"[\[\]\s]", piece) for piece in pieces):
            raise _fault(variable, text, f"{part!r} is no host and no range of hosts")
        choices = [
            list(_expand_range(variable, text, piece)) if number % 2 else [piece]
            for number, piece in enumerate(pieces)
        ]
        hosts += ["".join(words) for words in itertools.product(*choices)]
    return hosts


def _expand_range(variable: str, text: str, numbers: str) -> Iterator[str]:
    for part in numbers.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not 0 <= last - first < _MOST_HOSTS:
            raise _fault(variable, text, f"{part!r} is no range of numbers")
        yield from (str(i).zfill(len(match[1])) for i in range(first, last + 1))


def expand_counts(variable: str, text: str) -> list[int]:
    """Return the number of tasks of each host.

    Raises:
        ClusterError: The value is not a list of numbers.

    Example:
        >>> from jaxdist.cluster_resolver._slurm.lists import expand_counts
        >>> expand_counts("SLURM_STEP_TASKS_PER_NODE", "3(x2),1")
        [3, 3, 1]
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None or int(match[2] or 1) > _MOST_HOSTS:
            raise ClusterError(
                f"SlurmClusterResolver read {variable}={text!r}, in which {part!r} is no number of "
                "tasks.\n\nSlurm writes numbers, and how often each one is repeated.\n\n"
                f"It looks like {variable}='3(x2),1'."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _fault(variable: str, text: str, found: str) -> ClusterError:
    return ClusterError(
        f"SlurmClusterResolver read {variable}={text!r}, in which {found}.\n\n"
        "Slurm writes names with ranges in brackets, first number up to last number.\n\n"
        f"It looks like {variable}='node[01-03,7],login'."
    )
