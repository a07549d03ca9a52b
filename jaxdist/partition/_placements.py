"""Placements that a rule can give a leaf, and patterns for the paths of leaves."""

import dataclasses
import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import as_flag, as_list, check_instance, check_size, show

TABLE = "embedding"  # the parameter of `nnx.Embed`: [rows, columns]
_BRACES = re.compile(r"\{([^{}]*)\}")


def is_match(pattern: str, path: str) -> bool:
    """Whether a pattern matches the end of a path, or the whole path if it starts with `/`.

    A pattern is matched segment by segment. `*` and `?` are wildcards as for file names, `{a,b}`
    matches any of several strings, and `**` any number of segments.
    """
    own = tuple(path.split("/"))
    return any(_is_match(p, own) for p in _expand_braces(pattern))


@functools.lru_cache(maxsize=4096)
def _expand_braces(pattern: str) -> tuple[tuple[str, ...], ...]:
    """Return the patterns without braces, as segments; `**` is in front unless `/` anchors them."""
    found = _BRACES.search(pattern)
    if found is None:
        anchored = pattern.startswith("/")
        parts = tuple(pattern.strip("/").split("/"))
        return (parts if anchored else ("**", *parts),)
    # The regular expression finds innermost braces, so recursion also expands nested ones.
    before, after = pattern[: found.start()], pattern[found.end() :]
    options = (_expand_braces(before + option + after) for option in found[1].split(","))
    return tuple(p for option in options for p in option)


# Every leaf is matched against every rule, and `**` tries all splits of a path. The cache keeps
# the results for ends of paths, which different layers have in common.
@functools.lru_cache(maxsize=65536)
def _is_match(parts: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if not parts:
        return not path
    head, *rest = parts
    if head == "**":
        return any(_is_match(tuple(rest), path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], head) and _is_match(tuple(rest), path[1:])


def find_nearest(wanted: str, known: Iterable[str]) -> str | None:
    """Return the path or pattern in `known` most like `wanted`, for messages; None if empty."""
    # Compare the last segments as well as all segments: a pattern matches the end of a path.
    plain = re.sub(r"[{}*/]+", "/", wanted).strip("/")
    depth = wanted.strip("/").count("/") + 1

    def likeness(other: str) -> tuple[float, str]:
        end = "/".join(other.split("/")[-depth:])
        ratios = (
            difflib.SequenceMatcher(None, plain, re.sub(r"[{}*/]+", "/", x).strip("/")).ratio()
            for x in (end, other)
        )
        return (-max(ratios), other)

    return min(known, key=likeness, default=None)


REPLICA, LOGICAL = "replica", "logical"


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Placement of a leaf that every device holds as a whole.

    Example:
        >>> partition.Replicate()
        Replicate()
    """


@dataclasses.dataclass(frozen=True)
class Split:
    """Placement for tensor parallelism: one dim is split over the logical devices of a replica.

    The leaf stays an ordinary array, equal on all replicas. Within a replica, XLA partitions the
    operations that use it. With one logical device it is equivalent to `Replicate()`.

    Args:
        dim: The dim, whose size must be a multiple of the number of logical devices; a negative
            number counts from the end.
        must_divide: Whether any other size is an error; with False, such a leaf is not split.

    Raises:
        ArgumentTypeError: `dim` is not an integer, or `must_divide` is not a flag.

    Example:
        >>> partition.Split(1)
        Split(dim=1)
    """

    dim: int
    must_divide: bool = dataclasses.field(default=True, kw_only=True)

    @called("partition.Split")
    def __post_init__(self) -> None:
        _check_dim("Split", "dim", self.dim)
        as_flag("must_divide", self.must_divide)

    def __repr__(self) -> str:
        return _show_fields(self)


@dataclasses.dataclass(frozen=True)
class Shard:
    """Placement for FSDP (ZeRO-3): each replica holds a piece; layers gather it to use it.

    The leaf becomes a `Sharded` value. With one replica this is `Replicate()` or `Split(split)`.

    Args:
        dim: The dim to shard, whose size must be a multiple of the number of replicas. None takes
            the largest such dim whose pieces are whole tiles of a TPU (multiples of 128 along the
            last dim, and of 16 along others), or else the largest such dim; for an embedding table
            (`embedding`) its columns, so that `nn.embedding_lookup` need not gather it. If no dim
            is a multiple, None takes the dim that needs least padding, at most half of its size;
            otherwise the leaf is replicated.
        split: Another dim, which is split over the logical devices.
        axes: The replica axes to shard over, if the strategy has several (for instance, those
            within a slice). Over the other axes the leaf is replicated, and its gradient is
            all-reduced. None means all replica axes.
        pad: Whether to pad `dim` if its size is not a multiple of the number of replicas.
        min_bytes: Leaves with fewer bytes (in float32) are replicated. None takes the size from
            which sharding is faster, by the latency of a collective, as `sharded_update` does.
        must_divide: Whether a `dim` or `split` that the devices do not divide is an error; with
            False, such a `dim` counts as None, and such a `split` is not applied.

    Raises:
        ArgumentTypeError: `dim` or `split` is not an integer, `axes` are not names, `min_bytes` is
            not a number, or `pad` or `must_divide` is not a flag.
        ArgumentError: `dim` and `split` are the same, or `min_bytes` is negative.

    Example:
        >>> partition.Shard(dim=0, split=1)
        Shard(dim=0, split=1, axes=None, pad=False, min_bytes=0)
    """

    dim: int | None = None
    split: int | None = None
    axes: tuple[str, ...] | None = None
    pad: bool = dataclasses.field(default=False, kw_only=True)
    min_bytes: float | None = dataclasses.field(default=0, kw_only=True)
    must_divide: bool = dataclasses.field(default=True, kw_only=True)

    @called("partition.Shard")
    def __post_init__(self) -> None:
        for name in ("dim", "split"):
            if getattr(self, name) is not None:
                _check_dim("Shard", name, getattr(self, name))
        if self.dim is not None and self.dim == self.split:
            raise refuse(
                f"dim={self.dim} and split={self.split}.",
                "dim is cut over the replicas, and split is another dim, which is split over the "
                "logical devices.",
                f"Pass another split, or leave dim out, Shard(split={self.split}): the largest of "
                "the other dims is cut.",
            )
        # A frozen dataclass sets its own fields with `object.__setattr__`. A string is iterable,
        # so `tuple("data")` would be four axes.
        if isinstance(self.axes, str):
            object.__setattr__(self, "axes", (self.axes,))
        elif self.axes is not None:
            names = as_list("axes", self.axes, *_AXES)
            object.__setattr__(self, "axes", tuple(names))
        given: Any = self.axes
        is_names = isinstance(given, tuple) and given and all(isinstance(a, str) for a in given)
        if given is not None and not is_names:
            raise refuse_type(
                f"axes={show(self.axes)}.",
                "axes are names of replica axes of the strategy, or None for all of them.",
                "Pass for instance axes=('data',).",
            )
        as_flag("pad", self.pad)
        as_flag("must_divide", self.must_divide)
        check_size("min_bytes", self.min_bytes)

    def __repr__(self) -> str:
        return _show_fields(self)


@dataclasses.dataclass(frozen=True)
class ByNames:
    """Placement by the names of a leaf's dims, as in Flax's metadata.

    A module names the dims of its variables: `nnx.Linear(4, 8, kernel_metadata={"out_sharding":
    ("embed", "mlp")}, rngs=rngs)`.

    Args:
        axes: For each name of a dim: `"replica"` (sharded over the replicas), `"logical"` (split
            over the logical devices), an axis of the strategy's mesh, or None (neither).

    Raises:
        ArgumentTypeError: `axes` is not a mapping of strings to strings or None.

    Example:
        >>> partition.ByNames({"embed": "replica", "mlp": "logical", "vocab": None})
        ByNames(axes={'embed': 'replica', 'mlp': 'logical', 'vocab': None})
    """

    axes: Mapping[str, str | None]

    @called("partition.ByNames")
    def __post_init__(self) -> None:
        remedy = 'Write for instance ByNames({"embed": "replica", "mlp": "logical"}).'
        check_instance("axes", self.axes, Mapping, "a mapping from names of dims to axes", remedy)
        for name, axis in self.axes.items():
            if not isinstance(name, str):
                found = f"axes with the key {show(name)}."
                raise refuse_type(found, "Keys are the names of dims.", remedy)
            if axis is not None and not isinstance(axis, str):
                raise refuse_type(
                    f"axes[{name!r}]={show(axis)}, which is not an axis.",
                    "An axis is a string or None.",
                    'Pass "replica", "logical", the name of an axis of the mesh, or None.',
                )

    # The hash of the dataclass would hash the mapping, and a dict is not hashable.
    def __hash__(self) -> int:
        return hash(tuple(sorted(self.axes)))


Placement: TypeAlias = Replicate | Split | Shard | ByNames


_AXES = (
    "a tuple of names of replica axes of the strategy, or None for all of them",
    "Pass for instance axes=('data',).",
)


def check_placement(name: str, value: Any) -> Placement:
    """Check that `value` is a placement, and return it."""
    remedy = "Pass partition.Replicate(), Split(dim), Shard(...) or ByNames({...})."
    check_instance(name, value, (Replicate, Split, Shard, ByNames), "a placement", remedy)
    return value


def _show_fields(placement: Split | Shard) -> str:
    """Format a placement; `must_divide` only if it is not the default."""
    fields = vars(placement)
    shown = [f"{k}={v!r}" for k, v in fields.items() if k != "must_divide" or not v]
    return f"{type(placement).__name__}({', '.join(shown)})"


@called(lambda what: f"partition.{what}")
def _check_dim(what: str, name: str, dim: Any) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise refuse_type(
            f"{name}={show(dim)}.",
            f"{name} is the number of a dim, from 0, or from -1 backwards.",
            f"Pass for instance {name}=0.",
        )
