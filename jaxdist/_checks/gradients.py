"""`check_gradients`, which compares a step on R replicas with the step on one device."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.tree_util import keystr

from jaxdist import _replica
from jaxdist._called import called, refuse
from jaxdist._checks.gradient_report import (
    GradientReport,
    LeafComparison,
    Setting,
    compare,
    raise_noise_floor,
)
from jaxdist._checks.result_comparison import (
    assemble_sharded,
    compare_results,
    is_argument_leaf,
    is_number,
    is_per_replica,
    split_for_one_replica,
)
from jaxdist._collectives import Communication
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import Program, RunOptions, check_options, find_closure_values
from jaxdist._values import Kind, PerReplica, has_any_variable, is_sharded, placement_of
from jaxdist.errors import ArgumentError, ContextError, ShapeError

# Names in the state of Optax optimizers that divide by the magnitude of past gradients.
_ADAPTIVE = frozenset({"nu", "nu_max", "v_row", "v_col", "sum_of_squares", "e_g", "e_x"})


@called("Strategy.check_gradients", replaces=("strategy.run", "strategy.lower"))
def check_gradients(
    strategy: Any,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: RunOptions | None,
    rtol: float,
) -> GradientReport:
    """Run `fn` on the replicas and on one device, and compare; see `Strategy.check_gradients`."""
    layout: ReplicaMesh = strategy.layout
    if not isinstance(rtol, float) or not 0 < rtol < 1:
        raise refuse(
            f"rtol={rtol!r}.",
            "rtol is the largest difference that counts as equal, relative to the largest change "
            "of the leaf: a float between 0 and 1.",
            "Pass for instance rtol=1e-3.",
        )
    if not layout.is_local:
        raise ContextError(
            "Strategy.check_gradients was called on a strategy of several processes.\n\n"
            "It brings the batches of all replicas to one device, and this process has only "
            f"{len(layout.local_replicas)} of {layout.num_replicas} replicas.\n\n"
            "Check the step in one process: jaxdist.testing.virtual_devices"
            f"({layout.num_replicas}), then the same step on a MirroredStrategy."
        )
    if options is not None:
        # The arguments are used twice, and by the caller afterwards, so nothing may be donated.
        options = check_options(options)._replace(donate_argnums=(), saved_program=None)
    # Lowering costs a trace, and serves only to find the variables that the step uses. So it is
    # skipped if no variable exists.
    if has_any_variable():
        program = strategy.lower(fn, args, kwargs, options)
        _check_no_variables(program)
    on_many = _CallCopy(args, kwargs)
    on_one = _CallCopy(args, kwargs)
    on_one.assemble()
    joined = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _concatenate_rows(_name(path), leaf) if is_per_replica(leaf) else leaf,
        split_for_one_replica((on_one.args, on_one.kwargs)),
        is_leaf=is_argument_leaf,
    )
    many = strategy.run(fn, on_many.args, on_many.kwargs, options)
    twin = _make_single_device_twin(strategy)
    # Inside the scope of `strategy` another strategy cannot run.
    with _replica.enter_frame(None):
        one = twin.run(fn, joined[0], joined[1], options)
    leaves = [*on_many.compare_with(on_one, rtol)]
    given = assemble_sharded((tuple(args), kwargs), layout)
    many, one = assemble_sharded(many, layout), assemble_sharded(one, twin.layout)
    results, not_compared = compare_results(given, many, one, layout, rtol)
    leaves += results
    if not leaves:
        raise ArgumentError(
            "Strategy.check_gradients found nothing to compare: fn(*args) updates no NNX object, "
            "and returns no array that is the same on all replicas"
            f"{' (' + ', '.join(not_compared[:5]) + ' differ)' if not_compared else ''}.\n\n"
            "It compares the state that a step updates, and results that are equal on all "
            "replicas.\n\n"
            "Return the new state, or the all-reduced gradients."
        )
    strategies = tuple(name for name, value in find_closure_values(fn).items() if value is strategy)
    setting = _describe_step(args, kwargs, layout, on_many.kinds, strategies)
    # The update of an adaptive optimizer hides a wrong scale; its state shows it. The hint about
    # adaptive optimizers is dropped if that state was compared and is equal.
    seen = any(_ADAPTIVE & set(re.findall(r"\w+", x.name)) for x in leaves if x.is_resolved)
    if setting.is_adaptive and seen and all(not x.differs for x in leaves):
        setting = dataclasses.replace(setting, is_adaptive=False)
    return GradientReport(setting, tuple(leaves), tuple(not_compared))


def _check_no_variables(program: Program) -> None:
    if program.variables:
        written, read = program.variables.names
        names = [*written, *read]
        raise refuse(
            f"a step that uses {len(names)} variable(s): {names[:5]}.",
            "The step runs twice, on copies of its arguments; variables that it finds by itself "
            "would be changed by both runs, and belong to one strategy.",
            "Pass the state, or NNX objects, to the step as arguments.",
        )


def _make_single_device_twin(strategy: Any) -> Any:
    """Return a strategy of the same type, with the same axis names, on the first device only."""
    layout: ReplicaMesh = strategy.layout
    names = layout.mesh.axis_names
    grid = np.asarray(layout.devices[:1], dtype=object).reshape((1,) * len(names))
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    # Drop the strategy's communication options, since one device communicates nothing.
    twin = strategy._on(ReplicaMesh(mesh, layout.replica_axes), Communication())
    twin.stands_for = strategy
    return twin


def _name(path: Any) -> str:
    return ("args", "kwargs")[path[0].idx] + keystr(path[1:])


def _concatenate_rows(name: str, value: PerReplica) -> Any:
    """Concatenate the rows of all replicas on dim 0."""
    values = [np.asarray(v) for v in value.values]
    if values[0].ndim:
        return np.concatenate(values)
    if any(v != values[0] for v in values):
        raise ShapeError(
            f"Strategy.check_gradients cannot join {name}: {value!r} is a scalar on each replica."
            "\n\nOn one device the rows of all replicas are concatenated on dim 0, and scalars "
            "have no rows.\n\n"
            f"Give each replica one row of shape [1], and all of them [{len(values)}]."
        )
    return values[0]


class _CallCopy:
    """A copy of the arguments of a call; the step updates its NNX objects, not the caller's."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        flat, treedef = jax.tree_util.tree_flatten_with_path(
            (tuple(args), kwargs), is_leaf=is_argument_leaf
        )
        nodes: dict[int, Any] = {}
        self._names: list[str] = []
        for path, leaf in flat:
            if isinstance(leaf, nnx.Pytree) and id(leaf) not in nodes:
                nodes[id(leaf)] = leaf
                self._names.append(_name(path))
        # Split and merge all objects together, so that shared variables stay shared.
        graphdef, state = nnx.split(tuple(nodes.values()))
        # `nnx.merge` reuses the Variable objects of the state, so copy the state first.
        own_variables = jax.tree.map(lambda x: x, state)
        self._nodes: tuple[Any, ...] = nnx.merge(graphdef, own_variables)
        self._before = self._values()
        copies = dict(zip(nodes, self._nodes, strict=True))
        leaves = [copies.get(id(leaf), leaf) for _, leaf in flat]
        self.args, self.kwargs = jax.tree.unflatten(treedef, leaves)
        self.kinds = tuple(sorted({kind.__name__ for kind, _ in self._before.values()}))

    def _values(self) -> dict[str, tuple[type, list[Any]]]:
        flat = nnx.to_flat_state(nnx.state(self._nodes)) if self._nodes else ()
        found = {}
        for path, variable in flat:
            head, *rest = tuple(path)
            parts = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in rest)
            found[f"{self._names[int(str(head))]}{parts}"] = (
                type(variable),
                [
                    np.asarray(x.whole()) if is_sharded(x) else x
                    for x in jax.tree.leaves(variable, is_leaf=is_sharded)
                ],
            )
        return found

    def assemble(self) -> None:
        """Rebuild `Sharded` variables for one replica."""
        for _, value in nnx.iter_graph(self._nodes):
            if isinstance(value, nnx.Variable) and is_sharded(value.get_raw_value()):
                value.set_raw_value(split_for_one_replica(value.get_raw_value()))

    def compare_with(self, other: "_CallCopy", rtol: float) -> list[LeafComparison]:
        """Compare the change of each variable with its change in `other`."""
        theirs = other._values()
        groups: dict[str, list[LeafComparison]] = {}
        for name, (kind, many) in self._values().items():
            # Batch statistics and random streams differ between replicas by design.
            if issubclass(kind, (nnx.BatchStat, nnx.RngState)):
                continue
            before = self._before[name][1]
            for old, a, b in zip(before, many, theirs[name][1], strict=True):
                if is_number(a):
                    found = compare(name, np.asarray(old), np.asarray(a), np.asarray(b), rtol)
                    groups.setdefault(name.split(".")[0], []).append(found)
        return [leaf for leaves in groups.values() for leaf in raise_noise_floor(leaves)]


def _describe_step(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    layout: ReplicaMesh,
    kinds: Sequence[str],
    strategies: tuple[str, ...],
) -> Setting:
    flat, _ = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs), is_leaf=is_argument_leaf)
    per_replica = [x for _, x in flat if is_per_replica(x)]
    rows = [[len(v) if np.ndim(v) else 1 for v in x.values] for x in per_replica if len(x.values)]
    counts = next((r for r in rows if len(set(r)) > 1), None)
    real = None if counts is None else (sum(counts), max(counts) * layout.num_replicas)
    # A padded batch has the same number of rows on all replicas; only its mask marks the real ones.
    if real is None:
        real = _count_by_mask([x for _, x in flat], layout)
    names = {str(getattr(k, "name", getattr(k, "key", ""))) for path, _ in flat for k in path}
    for leaf in (x for _, x in flat if isinstance(x, nnx.Pytree)):
        names.update(str(p) for path, _ in nnx.to_flat_state(nnx.state(leaf)) for p in path)
    num_real, num_rows = real or (None, None)
    more = ("random key",) if any(_is_key(x) for _, x in flat) else ()
    return Setting(
        layout.num_replicas,
        num_real,
        num_rows,
        num_real != num_rows,
        (*kinds, *more),
        bool(names & _ADAPTIVE),
        strategies,
    )


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _count_by_mask(leaves: Sequence[Any], layout: ReplicaMesh) -> tuple[int, int] | None:
    """Return the numbers of real examples and of rows from a per-replica boolean mask, if any."""
    for leaf in leaves:
        if not is_per_replica(leaf) and not isinstance(leaf, jax.Array):
            continue
        if placement_of(leaf, layout).kind is not Kind.PER_REPLICA:
            continue
        mask = _concatenate_rows("mask", leaf) if isinstance(leaf, PerReplica) else leaf
        if mask.dtype == bool and mask.ndim == 1:
            return int(np.asarray(mask).sum()), int(mask.size)
    return None
