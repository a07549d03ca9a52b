"""Placements that a rule can give a leaf, and patterns for the paths of leaves."""

import dataclasses
import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from jaxdist._called import called, refuse, refuse_type
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import as_flag, as_integer, as_list, check_instance, check_size, show
from jaxdist.errors import ArgumentError

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
STAGE = "stage"  # the usual name of the axis of stages


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
        dim: The dim, whose size must be a multiple of the number of devices; a negative number
            counts from the end.
        axis: The axis of the mesh over which it is split, one that is not for replicas; None means
            all of these axes.
        must_divide: Whether any other size is an error; with False, such a leaf is not split.

    Raises:
        ArgumentTypeError: `dim` is not an integer, `axis` is not a string, or `must_divide` is not
            a flag.

    Example:
        >>> partition.Split(1)
        Split(dim=1)
        >>> partition.Split(0, axis="experts")
        Split(dim=0, axis='experts')
    """

    dim: int
    axis: str | None = None
    must_divide: bool = dataclasses.field(default=True, kw_only=True)

    @called("partition.Split")
    def __post_init__(self) -> None:
        _check_dim("Split", "dim", self.dim)
        _check_axis("Split", "axis", self.axis)
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
        split_axis: The axis of the mesh over which `split` is split; None means all axes that are
            not for replicas.
        must_divide: Whether a `dim` or `split` that the devices do not divide is an error; with
            False, such a `dim` counts as None, and such a `split` is not applied.

    Raises:
        ArgumentTypeError: `dim` or `split` is not an integer, `axes` or `split_axis` are not names,
            `min_bytes` is not a number, or `pad` or `must_divide` is not a flag.
        ArgumentError: `dim` and `split` are the same, `split_axis` comes without `split`, or
            `min_bytes` is negative.

    Example:
        >>> partition.Shard(dim=0, split=1)
        Shard(dim=0, split=1, axes=None, pad=False, min_bytes=0)
    """

    dim: int | None = None
    split: int | None = None
    axes: tuple[str, ...] | None = None
    pad: bool = dataclasses.field(default=False, kw_only=True)
    min_bytes: float | None = dataclasses.field(default=0, kw_only=True)
    split_axis: str | None = dataclasses.field(default=None, kw_only=True)
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
        _check_axis("Shard", "split_axis", self.split_axis)
        if self.split_axis is not None and self.split is None:
            raise refuse(
                f"split_axis={self.split_axis!r} without split.",
                "split_axis is the axis over which the dim split is split.",
                f"Pass the dim too, Shard(split=1, split_axis={self.split_axis!r}), or leave it "
                "out.",
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
            over all logical devices), an axis of the strategy's mesh, or None (none of these).

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


@dataclasses.dataclass(frozen=True)
class Stage:
    """Placement of a stack of layers, `[layers, ...]`: each stage of a pipeline has its own layers.

    `nn.pipeline_loss` runs such a stack. On a mesh without the axis, a leaf has the placement `of`.

    Shapes:
        `[layers, ...]`, split on dim 0 over the devices of the axis. With `chunks=v` the leaf is
        `[v, layers / v, ...]`, split on dim 1: chunk `c` of stage `s` is the stage `c * S + s` of
        `v * S` in the order of the model. So a reshape makes one form from the other.

    Args:
        of: The placement of one layer's leaf. Its dims are counted without those of the stack:
            `Stage(Shard())` for FSDP, `Stage(Split(1, axis="model"))` for tensor parallelism.
        axis: The axis of the mesh whose devices are the stages.
        chunks: How many parts of the model each stage has, for an interleaved schedule.

    Raises:
        ArgumentTypeError: `of` is not a placement of one layer, `axis` is not a string, or `chunks`
            is not an integer.
        ArgumentError: `chunks` is less than 1.

    Example:
        >>> partition.Stage(partition.Shard(), chunks=2)
        Stage(of=Shard(dim=None, split=None, axes=None, pad=False, min_bytes=0), chunks=2)

    Source:
        Interleaved stages: arXiv:2104.04473.
    """

    of: Replicate | Split | Shard | ByNames = Replicate()
    axis: str = dataclasses.field(default=STAGE, kw_only=True)
    chunks: int = dataclasses.field(default=1, kw_only=True)

    @called("partition.Stage")
    def __post_init__(self) -> None:
        check_instance(
            "of",
            self.of,
            (Replicate, Split, Shard, ByNames),
            "the placement of one layer",
            "Pass partition.Replicate(), Split(dim), Shard(...) or ByNames({...}).",
        )
        _check_axis("Stage", "axis", self.axis, is_needed=True)
        as_integer("chunks", self.chunks, least=1)

    @property
    def num_stack_dims(self) -> int:
        """Number of dims of the stack, which come before those of a layer."""
        return 1 if self.chunks == 1 else 2

    def __repr__(self) -> str:
        return _show_fields(self)


Placement: TypeAlias = Replicate | Split | Shard | ByNames | Stage


def has_axis(
    what: str, placement: Placement, axis: str, axes: tuple[str, ...], layout: ReplicaMesh
) -> bool:
    """Whether an array can be split over an axis: the mesh has it, with several devices.

    Args:
        what: The leaf, or the call, for errors.
        placement: The placement that names the axis.
        axis: The name.
        axes: The logical axes over which the array may be split.
        layout: The mesh.

    Raises:
        ArgumentError: The axis is for replicas or for stages, or the mesh has other axes.
    """
    if axis in layout.replica_axes:
        raise ArgumentError(
            f"{what}: {placement!r} names {axis!r}, which is an axis of replicas.\n\n"
            "Over the replicas a parameter is cut into pieces, which layers gather.\n\n"
            f"Use partition.Shard(axes=({axis!r},)), or name one of the other axes, "
            f"{list(layout.logical_axes)}."
        )
    if axis in axes:
        return layout.mesh.shape[axis] > 1
    if axis in layout.logical_axes:
        raise ArgumentError(
            f"{what}: {placement!r} names {axis!r}, which is the axis of the stages.\n\n"
            "Its devices have different layers, so a layer is not split over it.\n\n"
            f"Name another axis of the mesh, {dict(layout.mesh.shape)}."
        )
    if layout.num_logical == 1:
        return False
    known = list(layout.logical_axes)
    near = difflib.get_close_matches(axis, known, n=1, cutoff=0.0)
    raise ArgumentError(
        f"{what}: {placement!r} names the axis {axis!r}, and the mesh of the strategy has "
        f"{dict(layout.mesh.shape)}.\n\n"
        f"An array is split over an axis that is not for replicas: {known}.\n\n"
        f"Name {near[0]!r}, or give the mesh the axis {axis!r}, with one device if you like."
    )


_AXES = (
    "a tuple of names of replica axes of the strategy, or None for all of them",
    "Pass for instance axes=('data',).",
)


def check_placement(name: str, value: Any) -> Placement:
    """Check that `value` is a placement, and return it."""
    remedy = "Pass partition.Replicate(), Split(dim), Shard(...), ByNames({...}) or Stage()."
    check_instance(name, value, (Replicate, Split, Shard, ByNames, Stage), "a placement", remedy)
    return value


# Fields that are shown only where they are not these.
_USUAL = {"must_divide": True, "split_axis": None, "chunks": 1}


def _show_fields(placement: Split | Shard | Stage) -> str:
    """Format a placement; rare fields only if they are not the default."""
    usual: dict[str, Any] = {**_USUAL, "axis": STAGE if isinstance(placement, Stage) else None}
    fields = vars(placement).items()
    shown = [f"{k}={v!r}" for k, v in fields if k not in usual or v != usual[k]]
    return f"{type(placement).__name__}({', '.join(shown)})"


@called(lambda what: f"partition.{what}")
def _check_dim(what: str, name: str, dim: Any) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise refuse_type(
            f"{name}={show(dim)}.",
            f"{name} is the number of a dim, from 0, or from -1 backwards.",
            f"Pass for instance {name}=0.",
        )


@called(lambda what: f"partition.{what}")
def _check_axis(what: str, name: str, axis: Any, *, is_needed: bool = False) -> None:
    if not (isinstance(axis, str) or (axis is None and not is_needed)):
        raise refuse_type(
            f"{name}={show(axis)}.",
            f"{name} is the name of an axis of the strategy's mesh.",
            f"Pass a string, such as {name}='model'.",
        )
