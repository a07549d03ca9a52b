"""`GpuCluster`: GPUs of one kind, with a name such as `h100:4x8`."""

import dataclasses
import difflib
import functools
import math
import re
from typing import Any, final

from jaxdist._called import name_call
from jaxdist._validate import check_instance, check_text
from jaxdist.cost import CHIPS, Chip
from jaxdist.errors import TopologyError

DESCRIBED = "described:"
# Devices are Python objects, so a typo in a size must not fill the memory.
_MOST_GPUS = 1 << 16
_MOST_DIGITS = 9
# Names that people use for a row of the table.
_ALIASES = {
    "a100-80": "a100",
    "a100-80gb": "a100",
    "a100-40gb": "a100-40",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
}
_GPUS = tuple(name for name, chip in CHIPS.items() if chip.platform == "gpu")
_NAMES = sorted((*_GPUS, *_ALIASES), key=len, reverse=True)
# Beginnings of names of GPUs that are not in the table. TPUs are called v2 to v6e, and tpu7x.
_LOOKS_LIKE_GPU = re.compile(
    r"nvidia|geforce|tesla|amd|radeon|gpu|cuda|rocm|[rg]tx|mi\d\d|[gd][bh]\d\d|[abhlptv]\d\d"
)


@final
@dataclasses.dataclass(frozen=True)
class GpuCluster:
    """Hosts with GPUs of one kind. NVLink joins the GPUs of an NVLink domain.

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
        """The row of the GPU in `cost.CHIPS`."""
        return CHIPS[self.gpu]

    @property
    def num_gpus(self) -> int:
        """The total number of GPUs."""
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
        """The sizes in the form that XLA's compiler reads."""
        return f"{self.domains}x{self.hosts}x{self.gpus}"


def is_gpu_name(name: Any) -> bool:
    """Whether a string names GPUs, perhaps wrongly, rather than a slice of TPUs.

    Example:
        >>> is_gpu_name("h100:4x8"), is_gpu_name("described:H100"), is_gpu_name("v5e:4x4")
        (True, True, False)
    """
    if not isinstance(name, str):
        return False
    text = name.strip().lower().removeprefix(DESCRIBED).removeprefix("virtual:")
    kind = text.partition(":")[0].strip()
    return any(gpu in kind for gpu in _NAMES) or _LOOKS_LIKE_GPU.match(kind) is not None


def is_gpu_of_table(name: Any) -> bool:
    """Whether a string begins with the name of a GPU in the table, without `described:`."""
    kind = name.partition(":")[0].strip().lower() if isinstance(name, str) else ""
    return kind in _NAMES


def cluster_of(name: Any, parameter: str = "topology") -> GpuCluster:
    """Return the GPUs with a name.

    Args:
        name: `"h100:4x8"`: hosts and GPUs of a host; for `gb200`, whose NVLink domains have several
            hosts, `"gb200:2x18x4"`: domains, hosts of a domain, GPUs of a host.
        parameter: The parameter that received the name, for errors.

    Raises:
        TopologyError: The name has another form, the GPU is unknown, or there are more GPUs of a
            host, hosts of a domain, or GPUs in all than the limit.
        ArgumentTypeError: `name` is not a string.

    Example:
        >>> cluster_of("gb200:2x18x4").gpus_of_domain
        72
    """
    caller = name_call()
    remedy = f"Pass for instance {parameter}='h100:4x8'."
    check_instance(parameter, name, str, "a name of GPUs", remedy)
    check_text(parameter, name, "h100:4x8")
    given = f"{caller} was given {parameter}={_shorten(name)!r}"
    prefix = DESCRIBED if name.strip().lower().startswith(DESCRIBED) else ""
    gpu, sizes = _read_gpu(name, prefix, given)
    domain_hosts, host_gpus = CHIPS[gpu].pod
    # Each host is its own NVLink domain, unless domains have several hosts.
    wanted = 2 if domain_hosts == 1 else 3
    what = "hosts x GPUs of a host" if wanted == 2 else "NVLink domains x hosts x GPUs of a host"
    parts = sizes.lower().split("x")
    if len(parts) != wanted or not all(_is_size(part) for part in parts):
        raise TopologyError(
            f"{given}: {gpu!r} was understood, and the sizes {_shorten(sizes)!r} were not.\n\n"
            f"A name of {gpu} is {gpu}:{what}, {wanted} numbers with an x between them."
            f"\n\nPass for instance '{prefix}{_suggest(gpu, sizes)}'."
        )
    numbers = [int(part) for part in parts]
    if min(numbers) < 1:
        raise TopologyError(
            f"{given}, with a size of 0.\n\nEach of {what} is 1 or more.\n\n"
            f"Pass for instance '{prefix}{_suggest(gpu, sizes)}'."
        )
    domains, hosts, gpus = numbers if wanted == 3 else (numbers[0], 1, numbers[1])
    enough = f"Use '{prefix}{_spread(gpu, math.prod(numbers))}', which has at least as many GPUs."
    if gpus > host_gpus:
        raise TopologyError(
            f"{given}, with {gpus} GPUs of a host.\n\n"
            f"A host has {host_gpus} {gpu} at most.\n\n{enough}"
        )
    if hosts > domain_hosts:
        raise TopologyError(
            f"{given}, with {hosts} hosts of an NVLink domain.\n\n"
            f"An NVLink domain of {gpu} has {domain_hosts} hosts at most.\n\n{enough}"
        )
    if math.prod(numbers) > _MOST_GPUS:
        raise TopologyError(
            f"{given}, which is {math.prod(numbers):,} GPUs.\n\n"
            f"A plan is for {_MOST_GPUS:,} GPUs at most.\n\n"
            f"Use '{prefix}{_spread(gpu, _MOST_GPUS, below=True)}' or fewer."
        )
    return GpuCluster(gpu, domains, hosts, gpus)


def _read_gpu(name: str, prefix: str, given: str) -> tuple[str, str]:
    """Return the row of the GPU, and the sizes as written in the name."""
    kind, colon, sizes = name.strip()[len(prefix) :].partition(":")
    kind = kind.strip()
    gpu = _ALIASES.get(kind.lower(), kind.lower())
    if gpu.removeprefix("tpu") in CHIPS and gpu not in _GPUS:
        raise TopologyError(
            f"{given}, and {kind!r} is a TPU.\n\nGPUs are {', '.join(_GPUS)}.\n\n"
            "For TPUs call jaxdist.TPUStrategy(jaxdist.cluster_resolver.TPUClusterResolver("
            f"'{DESCRIBED}{kind}:{sizes or '4x4'}'))."
        )
    if gpu not in _GPUS:
        near = _find_nearest(name, gpu)
        example = _suggest(near or "h100", sizes.rpartition(":")[2])
        hint = f"The nearest is {near!r}: pass for instance" if near else "Pass for instance"
        raise TopologyError(
            f"{given}, and {_shorten(kind)!r} is not a GPU of the table.\n\n"
            f"GPUs are {', '.join(_GPUS)}.\n\n"
            f"{hint} '{prefix}{example}'. `jaxdist chips` lists all with their peaks."
        )
    if not colon:
        raise TopologyError(
            f"{given}: {gpu!r} was understood, and there are no sizes.\n\n"
            "A name is a GPU, a colon, and the numbers of hosts and of GPUs of a host.\n\n"
            f"Pass for instance '{prefix}{_make_example(gpu)}'."
        )
    return gpu, sizes


def _find_nearest(name: str, gpu: str) -> str | None:
    """Return the row that was probably meant by an unknown name, or None."""
    within = next((known for known in _NAMES if known in name.lower()), None)
    if within is not None:
        return _ALIASES.get(within, within)
    return next(iter(difflib.get_close_matches(gpu, _GPUS, 1)), None)


def _is_size(part: str) -> bool:
    # Python refuses to parse a number with thousands of digits.
    return part.isascii() and part.isdecimal() and len(part) <= _MOST_DIGITS


def _suggest(gpu: str, sizes: str) -> str:
    """Return the name that was probably meant by sizes that cannot be read."""
    hosts, gpus = CHIPS[gpu].pod
    wanted = 2 if hosts == 1 else 3
    found = re.findall(r"[0-9]+", sizes)
    if not found or "." in sizes or any(len(number) > _MOST_DIGITS for number in found):
        return _make_example(gpu)
    numbers = [max(1, int(number)) for number in found]
    if "*" in sizes and len(numbers) == wanted + 1:
        # In a name of TPUs, the number after * counts slices.
        numbers = [numbers[0] * numbers[-1], *numbers[1:-1]]
    elif wanted == 3 and len(numbers) == 2 and numbers[1] > gpus:
        numbers = [*numbers, gpus]
    if math.prod(numbers) > _MOST_GPUS:
        return _make_example(gpu)
    if len(numbers) == wanted and numbers[-1] <= gpus and (wanted == 2 or numbers[1] <= hosts):
        return f"{gpu}:{'x'.join(map(str, numbers))}"
    return _spread(gpu, math.prod(numbers))


def _spread(gpu: str, count: int, *, below: bool = False) -> str:
    """Return the name of at least (with `below` at most) `count` GPUs on whole hosts and domains.

    No name has more than the largest number of GPUs.
    """
    hosts, gpus = CHIPS[gpu].pod
    whole = hosts * gpus
    count = min(count, _MOST_GPUS // whole * whole)
    if count <= gpus:
        return GpuCluster(gpu, 1, 1, count).name
    if hosts > 1 and count <= whole:
        return GpuCluster(gpu, 1, -(-count // gpus), gpus).name
    domains = count // whole if below else -(-count // whole)
    return GpuCluster(gpu, domains, hosts, gpus).name


def _make_example(gpu: str) -> str:
    hosts, gpus = CHIPS[gpu].pod
    return GpuCluster(gpu, 4 if hosts == 1 else 2, hosts, gpus).name


def _shorten(text: str) -> str:
    """Return a string for an error, shortened: a whole file may have been passed by mistake."""
    return text if len(text) <= 60 else f"{text[:57]}..."
