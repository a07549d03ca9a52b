"""`Step`: where the tasks of a Slurm step run, read from the environment of one of them."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping

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
        >>> from jaxdist.cluster_resolver._slurm.step import expand_hosts
        >>> expand_hosts("SLURM_STEP_NODELIST", "a[1-2,05]b[0-1],c")
        ['a1b0', 'a1b1', 'a2b0', 'a2b1', 'a05b0', 'a05b1', 'c']
    """
    hosts: list[str] = []
    # Commas inside brackets are part of a range.
    for part in re.split(r",(?![^\[\]]*\])", text.strip()):
        # Prefix, range, prefix, range, ...: every second piece was in brackets.
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if not part or any(re.search(r"[\[\]\s]", piece) for piece in pieces):
            raise _fault(variable, text, f"{part!r} is not a host or a range of hosts")
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
            raise _fault(variable, text, f"{part!r} is not a range of numbers")
        yield from (str(i).zfill(len(match[1])) for i in range(first, last + 1))


def expand_counts(variable: str, text: str) -> list[int]:
    """Return the number of tasks of each host.

    Raises:
        ClusterError: The value is not a list of numbers.

    Example:
        >>> from jaxdist.cluster_resolver._slurm.step import expand_counts
        >>> expand_counts("SLURM_STEP_TASKS_PER_NODE", "3(x2),1")
        [3, 3, 1]
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None or int(match[2] or 1) > _MOST_HOSTS:
            raise ClusterError(
                f"SlurmClusterResolver read {variable}={text!r}, in which {part!r} is not a number "
                "of tasks.\n\nSlurm writes numbers, and how often each one is repeated.\n\n"
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


_HOSTS = "SLURM_STEP_NODELIST"
_COUNTS = "SLURM_STEP_TASKS_PER_NODE"
_TASKS = "SLURM_STEP_NUM_TASKS"


@dataclasses.dataclass(frozen=True)
class Step:
    """The tasks of a step.

    Attributes:
        rank: Number of this task among all tasks of the step.
        places: For each task its host, and its number on that host.
        most_on_one_host: The largest number of tasks on a host.
    """

    rank: int
    places: tuple[tuple[str, int], ...]
    most_on_one_host: int


def count_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks of the step."""
    return _read_integer(environ, _TASKS)


def read_step(
    environ: Mapping[str, str], tasks_per_node: int | Mapping[str, int] | None = None
) -> Step:
    """Return the tasks of the step that the environment describes.

    Raises:
        ClusterError: A variable is missing, or two contradict each other.
    """
    rank = _read_integer(environ, "SLURM_PROCID")
    counts = _read_counts(environ, tasks_per_node)
    places = _deal(counts, _read_plane(environ, max(counts.values())))
    if rank >= len(places):
        raise _contradict(
            f"SLURM_PROCID={rank}", f"{len(places)} tasks in {counts}", "Tasks are numbered from 0."
        )
    host, local = places[rank]
    # These variables may not show what a plugin of Slurm or `SLURM_HOSTFILE` does.
    own = environ.get("SLURMD_NODENAME", host)
    if own != host:
        raise _contradict(
            f"SLURM_PROCID={rank}, which is on {host!r}", f"SLURMD_NODENAME={own!r}", _DEALT
        )
    own_local = environ.get("SLURM_LOCALID", str(local))
    if own_local != str(local):
        raise _contradict(
            f"SLURM_PROCID={rank}, which is task {local} of its host",
            f"SLURM_LOCALID={own_local!r}",
            _DEALT,
        )
    return Step(rank, tuple(places), max(counts.values()))


_DEALT = (
    "Tasks are dealt to hosts one host after the other (block), in turn (cyclic), or some at a "
    "time in turn (plane), as SLURM_DISTRIBUTION says."
)


def _read_plane(environ: Mapping[str, str], most_on_one_host: int) -> int:
    """Return how many tasks a host gets before the next host gets some.

    Raises:
        ClusterError: The variables do not give the order in which tasks are distributed. All tasks
            of the step raise this: otherwise those that are where `block` would put them would wait
            for the others.
    """
    distribution = environ.get("SLURM_DISTRIBUTION", "block")
    # After the colon: how the tasks of a host are distributed to its cores. After the comma:
    # whether hosts are filled.
    kind, _, size = distribution.partition(":")[0].partition(",")[0].partition("=")
    if kind in ("block", "unknown"):
        return most_on_one_host
    if kind == "cyclic":
        return 1
    text = size or environ.get("SLURM_DIST_PLANESIZE", "")
    if kind == "plane" and text.isdecimal() and int(text) > 0:
        return int(text)
    what = "SLURM_DIST_PLANESIZE is missing" if kind == "plane" else "no variable gives the order"
    raise ClusterError(
        f"SlurmClusterResolver found SLURM_DISTRIBUTION={distribution!r}, and {what}.\n\n"
        "Each task finds the hosts of all tasks from the variables of Slurm, which is possible "
        "for block, cyclic and plane.\n\n"
        "Start the program with `srun --distribution=block`, or set TF_CONFIG in each task."
    )


def _read_counts(
    environ: Mapping[str, str], tasks_per_node: int | Mapping[str, int] | None
) -> dict[str, int]:
    if isinstance(tasks_per_node, Mapping) and _HOSTS not in environ:
        return dict(tasks_per_node)
    # In the order in which Slurm distributes the tasks. Sorted as strings, n10 would precede n9.
    hosts = expand_hosts(_HOSTS, _read(environ, _HOSTS))
    if isinstance(tasks_per_node, Mapping):
        if set(tasks_per_node) != set(hosts):
            raise _contradict(
                f"tasks_per_node for the hosts {sorted(tasks_per_node)}",
                f"{_HOSTS}={environ[_HOSTS]!r}",
                "tasks_per_node has a number for each host of the step.",
            )
        return {host: tasks_per_node[host] for host in hosts}
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, tasks_per_node)
    counts = expand_counts(_COUNTS, _read(environ, _COUNTS))
    if len(counts) != len(hosts) or len(set(hosts)) != len(hosts):
        raise _contradict(
            f"{_HOSTS}={environ[_HOSTS]!r}, which are {len(set(hosts))} hosts",
            f"{_COUNTS}={environ[_COUNTS]!r}, which are {len(counts)}",
            "Slurm writes a number of tasks for each host.",
        )
    total = environ.get(_TASKS, str(sum(counts)))
    if total != str(sum(counts)):
        raise _contradict(
            f"{_TASKS}={total!r}",
            f"{_COUNTS}={environ[_COUNTS]!r}, which are {sum(counts)} tasks",
            "The tasks of all hosts are those of the step.",
        )
    return dict(zip(hosts, counts, strict=True))


def _deal(counts: Mapping[str, int], plane: int) -> list[tuple[str, int]]:
    """Return each task's host and number on that host, if hosts get `plane` tasks in turn."""
    places = [(host, local) for host, count in counts.items() for local in range(count)]
    # Sorting keeps the order of the hosts among the tasks of one turn.
    return sorted(places, key=lambda place: place[1] // plane)


def _read(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
        found = (
            f"SLURM_JOB_ID={job!r} is set: this is a job of Slurm, but not a step of it"
            if job
            else "they have no SLURM_JOB_ID either"
        )
        raise ClusterError(
            f"SlurmClusterResolver read the variables of environ, which have no {name}; "
            f"{found}.\n\n"
            "Slurm sets it in each process that `srun` starts. A batch script or a shell of "
            "`salloc` is one process on one host.\n\nStart the program with `srun python "
            "script.py`."
        )
    return environ[name]


def _read_integer(environ: Mapping[str, str], name: str) -> int:
    text = _read(environ, name)
    if not text.strip().isdecimal():
        raise ClusterError(
            f"SlurmClusterResolver read {name}={text!r}.\n\nIt is an integer from 0 up.\n\n"
            "Start the program with `srun python script.py`, which sets it."
        )
    return int(text)


def _contradict(one: str, other: str, rule: str) -> ClusterError:
    return ClusterError(
        f"SlurmClusterResolver found {one}, and {other}: they contradict each other.\n\n{rule}\n\n"
        "Start all processes by one `srun`, and leave its variables as they are; `env | grep "
        "SLURM` shows them."
    )
