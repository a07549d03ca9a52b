"""`GpuCluster`: GPUs of one kind, by a name such as `h100:4x8`."""

import dataclasses
import difflib
import functools
import math
from typing import Any, final

from jaxdist._validate import check_instance, check_text
from jaxdist.cost import CHIPS, Chip
from jaxdist.errors import TopologyError

DESCRIBED = "described:"
# Devices are objects of Python, so a typing error in a size must not fill the memory.
_MOST_GPUS = 1 << 16
# Names that people use for a row of the table.
_ALIASES = {"a100-80": "a100", "a100-80gb": "a100", "a100-40gb": "a100-40"}
_GPUS = tuple(name for name, chip in CHIPS.items() if chip.platform == "gpu")


@final
@dataclasses.dataclass(frozen=True)
class GpuCluster:
    """Hosts with GPUs of one kind. The GPUs of an NVLink domain are joined by NVLink.

    Attributes:
        gpu: Its row in `cost.CHIPS`.
        domains: The number of NVLink domains, which only the network joins.
        hosts: The hosts of a domain.
        gpus: The GPUs of a host.

    Example:
        >>> cluster_of("h100:4x8")
        GpuCluster(gpu='h100', domains=4, hosts=1, gpus=8)
    """

    gpu: str
    domains: int
    hosts: int
    gpus: int

    @property
    def chip(self) -> Chip:
        """The row of the table."""
        return CHIPS[self.gpu]

    @property
    def num_gpus(self) -> int:
        """The number of all GPUs."""
        return self.domains * self.gpus_of_domain

    @property
    def gpus_of_domain(self) -> int:
        """The number of GPUs of one NVLink domain."""
        return self.hosts * self.gpus

    @functools.cached_property
    def name(self) -> str:
        """The name, as `cluster_of` reads it."""
        sizes = (self.domains, self.hosts, self.gpus)
        if self.chip.pod[0] == 1:
            sizes = (self.domains, self.gpus)
        return f"{self.gpu}:{'x'.join(map(str, sizes))}"

    @property
    def topology(self) -> str:
        """The sizes as XLA's compiler wants them."""
        return f"{self.domains}x{self.hosts}x{self.gpus}"


def is_gpu_name(name: Any) -> bool:
    """Whether a text names GPUs, perhaps wrongly, and not a slice of TPUs.

    Example:
        >>> is_gpu_name("h100:4x8"), is_gpu_name("described:H100"), is_gpu_name("v5e:4x4")
        (True, True, False)
    """
    if not isinstance(name, str):
        return False
    kind = name.strip().removeprefix(DESCRIBED).partition(":")[0].lower()
    return kind in _GPUS or kind in _ALIASES or _looks_like_gpu(kind)


def cluster_of(name: Any, caller: str = "compile_for", parameter: str = "topology") -> GpuCluster:
    """Return the GPUs of a name.

    Args:
        name: `"h100:4x8"`: hosts and GPUs of a host; for `gb200`, whose NVLink domains have several
            hosts, `"gb200:2x18x4"`: domains, hosts of a domain, GPUs of a host.
        caller: What was called, for errors.
        parameter: Its parameter that has the name.

    Raises:
        TopologyError: A name of another form, an unknown GPU, or more GPUs of a host or hosts of a
            domain than exist.
        ArgumentTypeError: `name` is no text.

    Example:
        >>> cluster_of("gb200:2x18x4").gpus_of_domain
        72
    """
    remedy = f"Pass for instance {parameter}='h100:4x8'."
    check_instance(caller, parameter, name, str, "a name of GPUs", remedy)
    check_text(caller, parameter, name, "h100:4x8")
    given = f"{caller} was given {parameter}={name!r}"
    gpu, found = _read_gpu(name, given)
    domain_hosts, host_gpus = CHIPS[gpu].pod
    # A host is an NVLink domain of its own, unless domains have several hosts.
    wanted = 2 if domain_hosts == 1 else 3
    what = "hosts x GPUs of a host" if wanted == 2 else "NVLink domains x hosts of one x its GPUs"
    example = f"{gpu}:4x{host_gpus}" if wanted == 2 else f"{gpu}:2x{domain_hosts}x{host_gpus}"
    if not all(part.isdecimal() for part in found) or len(found) != wanted:
        raise TopologyError(
            f"{given}: {gpu!r} was understood, and the sizes {'x'.join(found)!r} were "
            f"not.\n\nA name of {gpu} is {gpu}:{what}, {wanted} numbers with an x between them."
            f"\n\nPass for instance {_suggest(gpu, found) or example!r}."
        )
    sizes = [int(part) for part in found]
    if min(sizes) < 1:
        fixed = "x".join(str(max(1, size)) for size in sizes)
        raise TopologyError(
            f"{given} with a size of 0.\n\nEach of {what} is 1 or more.\n\n"
            f"Pass for instance '{gpu}:{fixed}'."
        )
    domains, hosts, gpus = sizes if wanted == 3 else (sizes[0], 1, sizes[1])
    if gpus > host_gpus:
        raise TopologyError(
            f"{given}, with {gpus} GPUs of a host.\n\n"
            f"A host has {host_gpus} {gpu} at most ({CHIPS[gpu].inner_source}).\n\n"
            f"Use {_spread(gpu, domains * hosts * gpus)!r}, which has as many GPUs or the next "
            "larger number."
        )
    if hosts > domain_hosts:
        raise TopologyError(
            f"{given}, with {hosts} hosts of an NVLink domain.\n\n"
            f"An NVLink domain of {gpu} has {domain_hosts} hosts at most.\n\n"
            f"Use {_spread(gpu, domains * hosts * gpus)!r}, which has as many GPUs or the next "
            "larger number."
        )
    if math.prod(sizes) > _MOST_GPUS:
        raise TopologyError(
            f"{given}, which are {math.prod(sizes):,} GPUs.\n\n"
            f"A plan is for {_MOST_GPUS:,} GPUs at most.\n\n"
            f"Use {_spread(gpu, _MOST_GPUS)!r} or fewer."
        )
    return GpuCluster(gpu, domains, hosts, gpus)


def _read_gpu(name: str, given: str) -> tuple[str, list[str]]:
    """Return the row of the GPU, and the sizes as they are written."""
    kind, colon, sizes = name.strip().removeprefix(DESCRIBED).partition(":")
    gpu = _ALIASES.get(kind.lower(), kind.lower())
    if gpu not in _GPUS:
        near = difflib.get_close_matches(gpu, _GPUS, 1, 0.0)[0]
        raise TopologyError(
            f"{given}, and {kind!r} is no GPU of the table.\n\n"
            f"GPUs are {', '.join(_GPUS)}.\n\n"
            f"The nearest is {near!r}: pass for instance '{near}:{sizes or _example_sizes(near)}'. "
            "`jaxdist chips` lists all with their peaks."
        )
    if not colon:
        raise TopologyError(
            f"{given}: {gpu!r} was understood, and there are no sizes.\n\n"
            "A name is a GPU, a colon, and the numbers of hosts and of GPUs of a host.\n\n"
            f"Pass for instance '{gpu}:{_example_sizes(gpu)}'."
        )
    return gpu, sizes.lower().split("x")


def _suggest(gpu: str, found: list[str]) -> str | None:
    """Return the name that was probably meant by sizes of the wrong number."""
    if not all(part.isdecimal() and int(part) for part in found):
        return None
    return _spread(gpu, math.prod(map(int, found)))


def _spread(gpu: str, count: int) -> str:
    """Return the name of at least `count` GPUs on whole hosts and domains, or of the most."""
    hosts, gpus = CHIPS[gpu].pod
    whole = hosts * gpus
    count = min(count, _MOST_GPUS // whole * whole)
    if count <= gpus:
        return f"{gpu}:1x{count}" if hosts == 1 else f"{gpu}:1x1x{count}"
    if hosts == 1:
        return f"{gpu}:{-(-count // gpus)}x{gpus}"
    if count <= hosts * gpus:
        return f"{gpu}:1x{-(-count // gpus)}x{gpus}"
    return f"{gpu}:{-(-count // (hosts * gpus))}x{hosts}x{gpus}"


def _example_sizes(gpu: str) -> str:
    hosts, gpus = CHIPS[gpu].pod
    return f"4x{gpus}" if hosts == 1 else f"2x{hosts}x{gpus}"


def _looks_like_gpu(kind: str) -> bool:
    """Whether a generation that no table has looks like one of NVIDIA, such as `h800` or `rtx`."""
    letters = kind.rstrip("0123456789")
    has_number = kind != letters and len(kind) - len(letters) >= 2
    return has_number and letters in {"a", "b", "h", "l", "v", "p", "t", "gb", "gh", "rtx", "gtx"}
