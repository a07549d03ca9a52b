"""Evaluates a trace, replacing the operations that XLA cannot run or runs wrongly.

On CPU and GPU, XLA's collectives for `pmax` and `pmin` lose nan. The rewrite compares integers in
the order of the floats instead. On slices of TPUs, large reduce-scatters run in two stages; see
Note [Scatter in two stages].

If only some mesh axes are manual, three more things cannot run. XLA's CPU backend aborts the
process on reductions of bf16 (jaxdist cannot set a compile option for that, since the user's own
jit may compile the program). JAX rejects callbacks. XLA rejects branches that end in different
layouts. The rewrite also evaluates the operations that a step places on one logical device; see
Note [Placed work].
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxdist import _compat, cost
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.extremes import EXTREMES, compute_extreme_on_integers
from jaxdist._program.jaxprs.interpreter import Environment
from jaxdist._program.jaxprs.subprograms import (
    contains,
    get_consts,
    open_jaxpr,
    rewrite_programs,
    subprograms,
    trace_again,
)
from jaxdist._program.logical.logical_device import LOGICAL_LAYOUT
from jaxdist._program.logical.placed_region import Part, PlacedCall, run_region
from jaxdist._program.logical.placing import Together, is_marked, make_schedule

# Note [Scatter in two stages]
#
# XLA for TPU turns a reduce-scatter over all chips of a square slice or of a 3D torus into an
# all-reduce, after which each chip keeps its piece: twice the bytes. Over a part of the slice it
# stays a reduce-scatter. So a large one runs first within parts of the slice, and then across them:
# within the halves of a square, and within the planes of a torus. The second stage has a small part
# of the bytes. `docs/machines/tpu.md` lists what XLA compiled.
#
# Consecutive replicas are in different parts (Note [Order of chips]). So the two stages give the
# same pieces as one operation; only the order of the sums differs. The stages are inserted when a
# program is lowered, after all proofs about it.

# Below this size start-up dominates the time of a collective.
_LEAST_BYTES = 1 << 20
_LEAST_CHIPS = 4  # along each dim


@dataclasses.dataclass(frozen=True)
class ScatterStages:
    """How the replicas of a slice reduce-scatter: within groups, then across them.

    Consecutive replicas are in different parts.

    Attributes:
        axes: The replica axes of one slice that have more than one device.
        parts: The number of parts of a slice.
        size: The number of replicas of a part.
        trivial: The replica axes of one device.
    """

    axes: tuple[str, ...]
    parts: int
    size: int
    trivial: frozenset[str] = frozenset()

    def fits(self, eqn: Any) -> bool:
        """Whether an operation is a large reduce-scatter over all replicas of each slice."""
        if eqn.primitive.name not in known.SCATTERS:
            return False
        names, [given] = eqn.params["axis_name"], eqn.invars
        over = names if isinstance(names, tuple) else (names,)
        is_whole = eqn.params["axis_index_groups"] is None and eqn.params["tiled"]
        is_over_slice = tuple(name for name in over if name not in self.trivial) == self.axes
        size = given.aval.size * given.aval.dtype.itemsize
        return is_whole and is_over_slice and size >= _LEAST_BYTES

    def scatter(self, array: jax.Array, dim: int) -> jax.Array:
        """Return this replica's result of a reduce-scatter along `dim` over all replicas."""
        name = self.axes[0] if len(self.axes) == 1 else self.axes
        count, parts = self.parts * self.size, self.parts
        within = [list(range(first, count, parts)) for first in range(parts)]
        across = [list(range(first, first + parts)) for first in range(0, count, parts)]
        for groups in (within, across):
            array = jax.lax.psum_scatter(
                array, name, scatter_dimension=dim, axis_index_groups=groups, tiled=True
            )
        return array


def find_stages(layout: ReplicaMesh) -> ScatterStages | None:
    """Return the stages of a layout whose replicas are the chips of TPU slices, or None.

    Also None for slices and orders of chips on which one operation is no worse.
    """
    if layout.platform != "tpu" or layout.num_logical > 1 or layout.num_virtual is not None:
        return None
    sizes = {name: layout.mesh.shape[name] for name in layout.replica_axes}
    long = [name for name in sizes if sizes[name] > 1]
    trivial = frozenset(sizes) - set(long)
    # The last axes are those within a slice.
    for first in range(len(long)):
        slices = np.array(layout.devices).reshape(-1, math.prod(sizes[n] for n in long[first:]))
        if all(len({cost.worker_of(d) for d in devices}) == 1 for devices in slices):
            [found, *others] = {_find_parts(list(devices)) for devices in slices}
            if found is None or others:
                return None
            return ScatterStages(tuple(long[first:]), *found, trivial)
    return None


def _find_parts(devices: Sequence[Any]) -> tuple[int, int] | None:
    """Return the number of parts of a slice, and the replicas of each."""
    coords: list[Any] = [getattr(d, "coords", None) for d in devices]
    if None in coords or len(set(map(tuple, coords))) < len(devices):
        return None  # two cores of a chip are two replicas
    lengths = _measure(coords)
    longer = [n for n in lengths if n > 1]
    if math.prod(lengths) != len(devices) or min(longer, default=0) < _LEAST_CHIPS:
        return None
    if len(longer) == 3:
        parts = lengths[0]
    elif len(longer) == 2 and longer[0] == longer[1]:
        parts = 2
    else:
        return None
    size = len(devices) // parts
    are_boxes = all(math.prod(_measure(coords[i::parts])) == size for i in range(parts))
    return (parts, size) if are_boxes else None


def _measure(coords: Sequence[Any]) -> list[int]:
    """Return the number of different coordinates along each dim."""
    return [len(set(along)) for along in zip(*coords, strict=True)]


_REDUCTIONS = frozenset(
    {"psum", "pmax", "pmin", "reduce_scatter", "psum_scatter", "psum_invariant"}
)
_INLINED = frozenset({"closed_call", "core_call"})
_CONSTRAINTS = (LOGICAL_LAYOUT.name, "sharding_constraint")


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """The rewrite of programs in which GSPMD partitions the `automatic` axes.

    If `keeps_nan`, maxima and minima over replicas are computed on integers. With `stages`, large
    reduce-scatters over all replicas run in two. If there are automatic axes: reductions of bf16
    run in f32, if `widens`; a pure callback runs once on each logical device, on the whole value;
    branches do not end in a layout; operations that are placed on one logical device run there.
    """

    automatic: frozenset[str]
    widens: bool
    keeps_nan: bool = False
    stages: ScatterStages | None = None

    def applies_to(self, jaxpr: Any) -> bool:
        """Whether an operation of `jaxpr` must be rewritten."""
        return any(
            self._is_extreme(e)
            or (self.stages is not None and self.stages.fits(e))
            or (bool(self.automatic) and self._is_for_automatic(e))
            or any(self.applies_to(s) for s in _list_subprograms(e))
            for e in open_jaxpr(jaxpr).eqns
        )

    def _is_for_automatic(self, eqn: Any) -> bool:
        return (
            self._is_narrow(eqn)
            or eqn.primitive.name == "pure_callback"
            or is_marked(eqn)
            or _has_constrained_branches(eqn)
        )

    def call(
        self, jaxpr: Any, args: Sequence[Any], consts: Sequence[Any] = (), *, backward: bool = False
    ) -> list[Any]:
        """Evaluate `jaxpr`, rewritten.

        Args:
            jaxpr: An open program.
            args: Its inputs.
            consts: Its constants.
            backward: Whether the whole program belongs to a gradient.
        """
        plan = make_schedule(jaxpr, backward=backward)
        given = zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
        env: Environment[Any] = Environment(operator.attrgetter("val"), dict(given), plan.alias)
        local: set[Any] = set()
        for step in plan.steps:
            operands = env.read_all(step.invars)
            if isinstance(step, Together):
                results = self._call_together(step, operands, local)
            else:
                results = self._rewrite_equation(
                    step, operands, backward or _compat.is_transposed(step)
                )
            env.write(step.outvars, results)
        return env.read_all(jaxpr.outvars)

    def _call_together(self, step: Together, operands: list[Any], local: set[Any]) -> list[Any]:
        [axis] = self.automatic
        parts: list[Part] = []
        for r in step.regions:
            takes_local = tuple(v in local for v in r.invars)
            run = functools.partial(run_region, r)
            parts.append(Part(run, r.device, takes_local, r.is_local))
        for region in step.regions:
            pairs = zip(region.outvars, region.is_local, strict=True)
            local.update(v for v, stays in pairs if stays)
        with _compat.use_source_of(step.regions[0].asked_by):
            return PlacedCall(tuple(parts), axis, self.widens)(*operands)

    def _rewrite_equation(self, eqn: Any, operands: list[Any], backward: bool) -> list[Any]:
        if self._is_extreme(eqn):
            return compute_extreme_on_integers(
                eqn.primitive.name, operands, lambda x: _compat.bind_like(eqn, x, eqn.params)
            )
        if self.stages is not None and self.stages.fits(eqn):
            with _compat.use_source_of(eqn):
                return [self.stages.scatter(operands[0], eqn.params["scatter_dimension"])]
        if not self.automatic:
            return self._bind_with_inner(eqn, operands, backward)
        if self._is_narrow(eqn):
            results = _compat.bind_like(eqn, [_widen(x) for x in operands], eqn.params)
            return [r.astype(v.aval.dtype) for r, v in zip(results, eqn.outvars, strict=True)]
        if eqn.primitive.name == "pure_callback":
            return self._call_callback(eqn, operands)
        if _has_constrained_branches(eqn):
            # A barrier after the layout, so that the branch does not end in it. Also before it,
            # since the gradient of a branch ends at the beginning of the branch.
            barrier = jax.lax.optimization_barrier
            branches = [
                self._trace_again(b.jaxpr, b.consts, backward, barrier)
                for b in eqn.params["branches"]
            ]
            return _compat.bind_like(eqn, operands, {**eqn.params, "branches": tuple(branches)})
        return self._bind_with_inner(eqn, operands, backward)

    def _bind_with_inner(self, eqn: Any, operands: list[Any], backward: bool) -> list[Any]:
        """Bind an operation, with the programs inside it rewritten."""
        if not any(self.applies_to(s) for s in _list_subprograms(eqn)):
            return _compat.bind_like(eqn, operands, eqn.params)
        if eqn.primitive.name in _INLINED:
            inner = next(iter(_list_subprograms(eqn)))
            program = open_jaxpr(inner)
            return self.call(program, operands, get_consts(inner), backward=backward)
        trace = functools.partial(self._trace_again, backward=backward)
        params = {k: rewrite_programs(v, trace) for k, v in eqn.params.items()}
        # A caller may differentiate the result, so keep the user's own derivative rules.
        params = _compat.rewrite_derivatives(params, self._trace_again)
        return _compat.bind_like(eqn, operands, params)

    def _call_callback(self, eqn: Any, operands: list[Any]) -> list[Any]:
        # Under a `shard_map` over the automatic axes all axes are manual, which JAX accepts.
        def whole(*values: Any) -> list[Any]:
            return _compat.bind_like(eqn, list(values), eqn.params)

        mapped = jax.shard_map(
            whole,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=self.automatic,
            check_vma=False,
        )
        return mapped(*operands)

    def _trace_again(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        backward: bool = False,
        around: Callable[[Any], Any] = lambda x: x,
    ) -> Any:
        def rewritten(*args: Any) -> list[Any]:
            results = self.call(jaxpr, [around(x) for x in args], consts, backward=backward)
            return [around(x) for x in results]

        return trace_again(rewritten, jaxpr)

    def _is_extreme(self, eqn: Any) -> bool:
        return (
            self.keeps_nan
            and eqn.primitive.name in EXTREMES
            and any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars)
        )

    def _is_narrow(self, eqn: Any) -> bool:
        return (
            self.widens
            and eqn.primitive.name in _REDUCTIONS
            and any(v.aval.dtype == jnp.bfloat16 for v in eqn.invars)
        )


def _has_constrained_branches(eqn: Any) -> bool:
    """Whether a conditional has a branch that may end in a layout; XLA compares these layouts."""
    return eqn.primitive.name == "cond" and any(
        contains(branch, name) for branch in eqn.params["branches"] for name in _CONSTRAINTS
    )


def _widen(x: Any) -> Any:
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def _list_subprograms(eqn: Any) -> list[Any]:
    """Return the sub-programs that may need a rewrite."""
    # A `shard_map` of the user makes the automatic axes manual, so nothing inside needs one.
    return [] if eqn.primitive.name == "shard_map" else subprograms(eqn)
