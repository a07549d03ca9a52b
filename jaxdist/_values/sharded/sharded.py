"""`Sharded`: one array of which each replica holds a piece."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist import _compat
from jaxdist._called import called, refuse_type
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import as_integer, show
from jaxdist._values.access import get_call_context
from jaxdist._values.arithmetic import Arithmetic
from jaxdist._values.arrays import compute_auto, copy_if_writable, refuse_ref, view_on
from jaxdist._values.sharded.cuts import Cut, Splits, find_split_entries
from jaxdist._values.sharded.piece_marks import OPEN, PIECE
from jaxdist.errors import ArgumentError, MissingNameError, ReplicaValueError, ShapeError

# Methods and properties for computing with an array. `devices` is left out: `held` has it.
_ARRAY_NAMES = frozenset(
    "T mT at astype conj dot flatten max mean min ravel reshape squeeze std sum swapaxes take "
    "transpose var".split()
)


class Sharded(Arithmetic):
    """One array of which each replica holds a piece, cut along one dim and padded.

    A registered pytree node with one leaf. It holds optimizer state of `sharded_update`, and
    parameters that `partition.place` shards. `Strategy.run` accepts it and returns it with the same
    layout. Inside a step `array` is the piece of the replica. Where a step uses the node as an
    array (`value[...]`, arithmetic, functions of `jax.numpy`), it gets the whole array, gathered
    (`partition.gather`). A scan, `vmap`, row or slice along another dim than that of the pieces
    gives a `Sharded` again. `Strategy.reduce`, `Strategy.gather`, checkpoints and, outside of
    steps, `np.asarray` treat it as the one array that it represents. `shape`, `dtype` and
    `sharding` are those of this array; with padding it has no `sharding`.

    Shapes:
        A logical `[..., size, ...]` on `R` replicas is stored as `[..., R*p, ...]` with
        `p = ceil(size / R)`, sharded over the replica axes on `dim`. Elements beyond `size` are
        padding and have no meaning. Functions of pytrees find the logical array, in a step and
        outside. If they put a new array of that shape into the node, jaxdist pads and cuts it when
        it enters a step.

    Cost:
        None for the node itself. An all-gather where a step uses it as an array. Outside of
        steps, each function of pytrees removes the padding, if any: a slice of the whole array,
        which moves rows between devices. `strategy.run(tx.init, (params,))` creates the state of
        an optimizer without this slice.

    Args:
        array: The padded array over all replicas; inside a step the piece of one replica.
        dim: The dim that is cut, counted from the front.
        size: Length of that dim without padding.
        axes: The replica axes over which the array is cut; None means all. Replicas that differ
            only on the other axes hold the same piece.
        split: Another dim, which is sharded over the logical devices of each replica, or None. Or
            pairs of a dim and the name of a logical axis: `((0, "stage"), (2, "model"))`.

    Raises:
        ArgumentError: `dim` is not a dim of the array, or `size` is less than 1.
        ArgumentTypeError: `split` is neither a dim nor pairs of a dim and the name of an axis.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> rows = np.arange(4.0, dtype="float32")
        >>> held = Sharded(rows, dim=0, size=3)
        >>> strategy.run(lambda x: Sharded(x.array * 2, 0, 3), (held,)).whole().tolist()
        [0.0, 2.0, 4.0]

    Source:
        ZeRO, arXiv:1910.02054.
    """

    __slots__ = ("_has_padding", "_held", "_is_assigned", "axes", "dim", "size", "split")

    dim: int
    size: int
    axes: tuple[str, ...] | None
    split: int | Splits | None

    @called("Sharded")
    def __init__(
        self,
        array: Any,
        dim: int,
        size: int,
        axes: tuple[str, ...] | None = None,
        split: int | Splits | None = None,
    ) -> None:
        dim = as_integer("dim", dim, least=0)
        size = as_integer("size", size, least=1, remedy="Leave an array without elements as it is.")
        if not hasattr(array, "shape") and not isinstance(array, int):
            raise refuse_type(
                f"array={show(array)}.",
                "array is the padded array over all replicas, or in a step the piece of one.",
                "Pass an array of jax or numpy.",
            )
        refuse_ref("Sharded was given array", array)
        if axes is not None and not (
            isinstance(axes, tuple) and axes and all(isinstance(a, str) for a in axes)
        ):
            raise refuse_type(
                f"axes={show(axes)}.",
                "axes is a tuple of names of replica axes.",
                "Pass for instance axes=('replica',), or leave it out for all of them.",
            )
        if split is not None:
            split = _as_splits(split)
        given: Any = array
        rank = getattr(given, "ndim", None)
        if rank is not None and not 0 <= dim < rank:
            raise ArgumentError(
                f"Sharded(array, dim={dim}): the array is {given.dtype}{list(given.shape)}, of "
                f"rank {rank}.\n\ndim is the number of a dim of the array.\n\n"
                + (f"Pass one of {[*range(rank)]}." if rank else "Leave a scalar as it is.")
            )
        self.dim, self.size, self.axes, self.split = dim, size, axes, split
        self._is_assigned = False
        # In a step, the constructor declares a piece (see Note [Pieces in a trace]). Nodes that
        # functions of pytrees rebuild come from `make_undeclared`, which does not.
        layout = _find_layout()
        if layout is None:
            array = copy_if_writable(array)
        # JAX rebuilds structures with placeholders, such as numbers, in place of arrays.
        elif rank is not None:
            array = declare_piece(array, self.cut, layout)
        self._held: Any = array
        self._has_padding = is_longer(given, self.cut)

    @property
    def array(self) -> Any:
        """The padded array over all replicas; inside a step the piece of this replica.

        Example:
            >>> Sharded(np.arange(4), dim=0, size=3).array.tolist()
            [0, 1, 2, 3]
        """
        layout = _find_layout()
        if layout is None:
            return self._held
        traced = isinstance(self._held, jax.core.Tracer)
        return open_piece(self._held if traced else self.whole(), self.cut, layout)

    @property
    def held(self) -> Any:
        """The array in the pytree node: padded outside of steps, the whole traced array inside.

        For shape, dtype and sharding, not for computing.

        Example:
            >>> Sharded(np.arange(4), dim=0, size=3).held.shape
            (4,)
        """
        return self._held

    @property
    def has_padding(self) -> bool:
        """Whether `held` is longer than the array that it represents.

        False for an array that a function of pytrees put into the node, whatever its shape.

        Example:
            >>> Sharded(np.arange(4), dim=0, size=3).has_padding
            True
        """
        return self._has_padding

    @property
    def is_assigned(self) -> bool:
        """Whether a step has assigned a whole array to the node, which needs no gather.

        Example:
            >>> Sharded(np.arange(4), dim=0, size=3).is_assigned
            False
        """
        return self._is_assigned

    @property
    def cut(self) -> Cut:
        """Dim, size, axes and split dim.

        Example:
            >>> Sharded(np.arange(4), dim=0, size=3).cut
            Cut(dim=0, size=3, axes=None, split=None)
        """
        return Cut(self.dim, self.size, self.axes, self.split)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the one array, without padding.

        Example:
            >>> Sharded(np.zeros((2, 4)), dim=1, size=3).shape
            (2, 3)
        """
        shape: tuple[int, ...] = tuple(self._held.shape)
        # An array that a function of pytrees put here may have other dims, and has no padding.
        if not self._has_padding:
            return shape
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self._held.dtype

    @property
    def ndim(self) -> int:
        """The rank of the array."""
        return self._held.ndim

    @_compat.outside_of_meshes
    def whole(self) -> Any:
        """Return the whole array, without padding.

        Shapes:
            `[..., size, ...]`, with the sharding of `held` if there is no padding.

        Cost:
            None without padding. Otherwise a slice, which may move rows between devices.

        Raises:
            ReplicaValueError: Called inside a step, where a replica has only a piece.

        Example:
            >>> Sharded(np.arange(4), dim=0, size=3).whole().tolist()
            [0, 1, 2]
        """
        layout = _find_layout()
        if layout is not None and isinstance(self._held, jax.core.Tracer):
            pieces = self.cut.pieces(layout)
            if self._is_assigned:
                return self._held
            if pieces > 1:
                raise ReplicaValueError(
                    "Sharded.whole was called inside a step, where a replica has "
                    f"a piece of {self.cut.rows(pieces)} of the {self.size} elements of dim "
                    f"{self.dim}.\n\n"
                    "Inside a step a replica has one piece of the array.\n\n"
                    "Gather the pieces: jaxdist.partition.gather(value)."
                )
            return self.array
        array = self._held
        if not self._has_padding:
            return array
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, array.dtype)
        if isinstance(array, jax.core.Tracer) or not _compat.is_inside_trace():
            return _remove_padding(array, self.cut)
        # A step that closes over the node: the trace of one replica cannot slice an array over the
        # devices of all replicas, so the slice runs outside of the trace.
        return _compat.call_outside_traces(_remove_padding, array, self.cut)

    def _operand(self) -> Any:
        """Return the whole array: gathered inside a step, without padding outside."""
        layout = _find_layout()
        if layout is not None and isinstance(self._held, jax.core.Tracer):
            return gather_whole(self, layout)
        return self.whole()

    def __getitem__(self, *indices: Any) -> Any:
        # As with the operators, errors about an index are those of JAX's arrays.
        (index,) = indices
        layout = _find_layout()
        if layout is None or not isinstance(self._held, jax.core.Tracer):
            return self.whole()[index]
        if self._is_assigned:
            return self._held[index]
        # Rows and slices before the cut dim are taken first, so that only they are gathered.
        lead, rest, cut = self.cut.split_index(index)
        if not lead:
            return gather_whole(self, layout)[index]
        return gather_whole(make_undeclared(self._held[lead], cut), layout)[rest]

    def __jax_array__(self) -> Any:
        return self._operand()

    def __getattr__(self, name: str) -> Any:
        if name in _ARRAY_NAMES:
            return getattr(self._operand(), name)
        if name != "sharding" or isinstance(self._held, jax.core.Tracer):
            raise MissingNameError(
                f"Sharded has no attribute {name!r}; the one array has it: "
                "jaxdist.partition.gather(value) inside a step, value.whole() outside, and "
                "np.asarray(value) for functions of NumPy."
            )
        if not self._has_padding:
            return self._held.sharding
        raise MissingNameError(
            f"{self!r} has no attribute 'sharding': {self.size} elements of dim {self.dim} do not "
            f"divide over its pieces, so it is held with padding.\n\n"
            "A sharding of JAX cuts an array into equal pieces.\n\n"
            "Place the whole array, which pads it: jaxdist.partition.place(strategy, array, rules)."
            " value.held.sharding is that of the padded array."
        )

    @called("NumPy")
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        operand = self._operand()
        if isinstance(operand, jax.core.Tracer):
            raise refuse_type(
                f"{self!r} inside a step.",
                "A step is traced, and NumPy needs numbers.",
                "Use jax.numpy, which gathers the pieces: jnp.asarray(value).",
            )
        host = np.asarray(operand, dtype=dtype)
        return host.copy() if copy else host

    def __repr__(self) -> str:
        array = self._held
        if not hasattr(array, "shape") or self.dim >= len(array.shape):
            return f"Sharded({array!r}, dim={self.dim}, size={self.size})"
        return (
            f"Sharded({array.dtype}{list(self.shape)} cut along dim {self.dim}, held as "
            f"{list(array.shape)})"
        )


def _as_splits(split: Any) -> int | Splits:
    """Check the argument `split`: a dim, or pairs of a dim and the name of an axis."""
    if not isinstance(split, (tuple, list)):
        return as_integer("split", split, least=0)
    pairs = [p for p in split if isinstance(p, (tuple, list)) and len(p) == 2]
    if not pairs or len(pairs) < len(split) or not all(isinstance(p[1], str) for p in pairs):
        raise refuse_type(
            f"split={show(split)}.",
            "split is a dim, or pairs of a dim and the name of a logical axis.",
            'Pass for instance split=((0, "stage"), (2, "model")).',
        )
    return tuple((as_integer("split", d, least=0), axis) for d, axis in pairs)


def is_sharded(x: Any) -> bool:
    """Whether `x` is a `Sharded`; for `is_leaf`."""
    return isinstance(x, Sharded)


def assign_elements(node: Sharded, value: Any, index: Any) -> Sharded:
    """Return the array with other elements, as `variable[index] = value` of NNX does.

    In a step all replicas assign the same value, which is cut when the step returns it.
    """
    given: Any = value._operand() if is_sharded(value) else value
    if index is not ... or jnp.shape(given) != node.shape:
        given = jnp.asarray(node._operand()).at[index].set(given)
    is_in_step = _find_layout() is not None
    return make_undeclared(jnp.asarray(given), node.cut, is_assigned=is_in_step)


def make_undeclared(
    array: Any, cut: Cut, *, has_padding: bool = False, is_assigned: bool = False
) -> Sharded:
    """Make a node without `PIECE`; the analysis of the step must prove that it holds a piece."""
    value = object.__new__(Sharded)
    value._held, value._has_padding = array, has_padding
    value._is_assigned = is_assigned
    value.dim, value.size, value.axes, value.split = cut
    return value


def _remove_padding(array: Any, cut: Cut) -> Any:
    whole = compute_auto(lambda x: x[(*[slice(None)] * cut.dim, slice(cut.size))], array)
    mesh = getattr(getattr(array, "sharding", None), "mesh", None)
    own = getattr(whole, "sharding", None)
    if not isinstance(mesh, Mesh) or not isinstance(own, NamedSharding) or own.mesh == mesh:
        return whole
    return view_on(whole, NamedSharding(mesh, own.spec))


def is_longer(array: Any, cut: Cut) -> bool:
    return cut.dim < getattr(array, "ndim", 0) and array.shape[cut.dim] > cut.size


def _find_layout() -> ReplicaMesh | None:
    """Return the mesh of the step that is being traced around the caller, or None."""
    here = get_call_context()
    return here.layout if here.in_replica else None


def declare_piece(array: Any, cut: Cut, layout: ReplicaMesh) -> Any:
    """Declare `array` to be the piece of this replica, and return the whole array; moves nothing.

    Raises:
        ShapeError: The piece has another length.
    """
    count = cut.pieces(layout)
    rows, have = cut.rows(count), array.shape[cut.dim]
    if rows != have:
        raise ShapeError(
            f"A step made a piece of {have} rows: Sharded(array, dim={cut.dim}, "
            f"size={cut.size}).\n\n"
            f"{cut.size} elements on {count} replicas are {rows} on each, the last ones padded."
            f"\n\nGive an array whose dim {cut.dim} has {rows} elements."
        )
    return PIECE.bind(jax.numpy.asarray(array), cut=cut, rows=rows, divisor=1, others=())


def open_piece(
    array: Any,
    cut: Cut,
    layout: ReplicaMesh,
    *,
    divisor: int = 1,
    others: tuple[str, ...] = (),
    name: str = "",
) -> Any:
    """Return the piece of this replica of a whole array in a step; moves nothing.

    `divisor`, `others` and `name` are parameters of `OPEN`.
    """
    rows = cut.rows(cut.pieces(layout))
    whole = jax.numpy.asarray(array)
    return OPEN.bind(whole, cut=cut, rows=rows, divisor=divisor, others=others, name=name)


def cut_piece(array: Any, cut: Cut, layout: ReplicaMesh) -> Any:
    """Cut the piece of this replica from an array that every replica has as a whole."""
    # Padded first: `dynamic_slice` clamps its start, so the last piece would get wrong rows.
    count = cut.pieces(layout)
    padded, rows = pad_dim(array, cut.dim, cut.padding(count)), cut.rows(count)
    start = jax.lax.axis_index(cut.over(layout)) * rows
    return jax.lax.dynamic_slice_in_dim(padded, start, rows, cut.dim)


def pad_dim(array: Any, dim: int, more: int) -> Any:
    """Append `more` zeros to `array` along one dim."""
    if not more:
        return array
    widths = [(0, more if d == dim else 0, 0) for d in range(array.ndim)]
    return jax.lax.pad(array, jnp.zeros((), array.dtype), widths)


# The name of gathered parameters for `jax.checkpoint` policies, such as `remat_policy`.
GATHERED = "jaxdist_gathered"


def gather_whole(value: Sharded, layout: ReplicaMesh, dtype: Any = None) -> Any:
    """Gather the whole array inside a step; its gradient is a piece of the mean over replicas.

    With `dtype`, the gather and the scatter of its gradient are in this dtype.
    """
    cut, held = value.cut, value.held
    if value.is_assigned:
        return held if dtype is None else held.astype(dtype)
    if cut.dim >= held.ndim or held.shape[cut.dim] != cut.size:
        raise ReplicaValueError(
            f"An array in pieces was used in a step as {held.dtype}{list(held.shape)}, in a node "
            f"that declares a cut along dim {cut.dim}.\n\n"
            f"Dim {cut.dim} of the array has {cut.size} elements. A scan, vmap or index along "
            "that dim would take a part of each piece.\n\n"
            "Cut another dim (partition.Shard(dim), counted in the whole array), or gather it "
            "before: jaxdist.partition.gather(value)."
        )
    # JAX cannot lower the scatter of a value whose type has a sharding, which is the transpose.
    spec = _compat.find_spec_of_type(held)
    if spec is not None:
        value = make_undeclared(jax.sharding.reshard(held, jax.P()), cut)
    own = open_to_gather(value, layout)
    whole = gather_opened(own if dtype is None else own.astype(dtype), cut, layout)
    return whole if spec is None else jax.sharding.reshard(whole, spec)


def open_to_gather(value: Sharded, layout: ReplicaMesh) -> Any:
    """Return the piece of this replica for `gather_opened`, in a step.

    The gradient of the piece becomes that of the mean over replicas, in its own dtype.
    """
    # The transpose of the all-gather sums over the axes of the cut only. So the transpose of `OPEN`
    # sums over the other axes, and divides by the number of replicas.
    others = tuple(a for a in layout.replica_axes if a not in value.cut.over(layout))
    return open_piece(value.held, value.cut, layout, divisor=layout.num_replicas, others=others)


def gather_opened(own: Any, cut: Cut, layout: ReplicaMesh) -> Any:
    """Gather the whole array of pieces from `open_to_gather`, or of a row of each of them."""
    pieces = cut.pieces(layout)
    if pieces == 1:
        return own
    layout.check_axes_are_free("partition.gather")
    whole = _all_gather(own, cut, layout)
    # Named before and after the padding is removed, so that a policy drops both arrays.
    whole = checkpoint_name(whole, GATHERED)
    if cut.padding(pieces):
        whole = checkpoint_name(jax.lax.slice_in_dim(whole, 0, cut.size, axis=cut.dim), GATHERED)
    return whole


def _all_gather(own: Any, cut: Cut, layout: ReplicaMesh) -> Any:
    """Gather the pieces of all replicas; each logical device gathers its own part of them."""
    # Before a collective over manual axes, XLA gathers the array over the automatic axes. So where
    # the array is sharded over the logical axes, these are made manual, too.

    def gather(held: Any) -> Any:
        return jax.lax.all_gather(held, cut.over(layout), axis=cut.dim, tiled=True)

    around = jax.sharding.get_abstract_mesh()
    is_partial = frozenset(around.manual_axes) == frozenset(layout.replica_axes)
    # A dim of a row, or of an array that the user transposed, may not divide: it stays whole here.
    splits = {
        d: names
        for d, names in find_split_entries(cut, layout).items()
        if d < own.ndim and not own.shape[d] % math.prod(layout.mesh.shape[a] for a in names)
    }
    if not is_partial or not (splits or around.explicit_axes):
        return gather(own)
    axes = {name for names in splits.values() for name in names}
    spec = PartitionSpec()
    # With Explicit axes the piece is whole over them here. JAX 0.12 cannot lower the transpose of
    # the gather, a scatter, while they are not manual.
    if around.explicit_axes:
        axes = {*layout.logical_axes}
    elif splits:
        spec = PartitionSpec(*(splits.get(d) for d in range(max(splits) + 1)))
    inner = jax.shard_map(gather, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False)
    return inner(own)
