"""The trace of a step, as one replica runs it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Literal
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._collectives import fresh_trace_key
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.arguments import Static, explain_ref, unflatten
from jaxdist._program.arguments.in_slot import InSlot
from jaxdist._program.arguments.leaf_names import LeafNames, find_function_with_source, leaf_names
from jaxdist._program.arguments.opaque import (
    ITERABLE_LEAVES,
    ends_after_one_reading,
    find_array,
    find_tracer,
    hidden_tracer_message,
)
from jaxdist._program.nnx import closures, graph_rules
from jaxdist._program.nnx.graph import GraphShape
from jaxdist._program.proof.local_pieces import Local, LocalPieces, is_marked
from jaxdist._program.proof.pieces import ShardFact, ShardingProof, check_results
from jaxdist._program.proof.reduced_gradients import check_reduced_gradients
from jaxdist._program.proof.replication import NONE
from jaxdist._program.proof.uneven_mean import MeanOverReplicas
from jaxdist._program.trace import sharded
from jaxdist._program.trace.axis_errors import (
    axis_error,
    explicit_types_error,
    name_of,
    needs_explicit_axes,
    out_sharding_error,
)
from jaxdist._program.trace.layouts import LayoutsOfReplica, check_layouts, names_layouts
from jaxdist._program.trace.step_errors import (
    explain_methods_of_optimizers,
    explain_row_numbers,
    find_better_error,
)
from jaxdist._replica import Frame, HasLayout, ReplicaContext, enter_frame
from jaxdist._validate import as_array, check_keys
from jaxdist._values import (
    Cut,
    PerReplica,
    Sharded,
    Stop,
    Variable,
    copy_if_writable,
    is_leaked,
    make_undeclared,
    open_containers,
    stops,
    view_auto,
)
from jaxdist._values import open_piece as opened_piece
from jaxdist.errors import ArgumentTypeError, ContextError, JaxdistError, ReplicaValueError


@dataclasses.dataclass(frozen=True)
class Signature:
    """The key of a program: everything that decides which program a call runs. It is hashable."""

    treedef: PyTreeDef
    slots: tuple[Any, ...]
    inputs: tuple[InSlot, ...]  # the variables of NNX objects first
    graph: GraphShape | None
    inside_trace: bool = False
    # How the trace accesses the variables of the step (`variables.step_variables.Lifting`).
    lifting: Any = dataclasses.field(default=None, compare=False)
    # Inputs that are padded to one shape: their number, and the true shape on each replica.
    uneven: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()
    # Tells `treedef` apart from structures that JAX considers equal; see Note [Equal constants].
    structure: Any = None
    # JAX's settings; see `_compat.read_settings`.
    settings: Any = dataclasses.field(default=None, repr=False)
    # The name of the step in messages; a different one for a batch that will come later.
    step: str = dataclasses.field(default="this step", compare=False)

    def manual_specs(self, layout: ReplicaMesh) -> tuple[PartitionSpec, ...]:
        """Return for each input the part of its layout that names replica axes."""
        return tuple(i.placement.manual_spec(layout) for i in self.inputs)


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step as one `shard_map` of a local jaxpr, and the structure of its results.

    `operands[i]` is the i-th input of the jaxpr: the number of an argument leaf (`Argument`), or a
    value that the step closes over. Scalar results have one extra dim, so that they can be laid
    out over the replicas.
    """

    closed: Any
    operands: tuple[Any, ...]
    template: Any
    num_graph: int  # results that are state: variables of NNX objects, then assigned variables
    paths: tuple[str, ...]  # of the user's traced results
    shapes: tuple[tuple[int, ...], ...]  # on one replica, of all results
    manual_axes: frozenset[str]
    # Results that are padded: their number, and the true shape on each replica.
    uneven: dict[int, tuple[tuple[int, ...], ...]] = dataclasses.field(default_factory=dict)
    # Results that are `Sharded` arrays: their number, and how they are cut.
    cuts: dict[int, Cut] = dataclasses.field(default_factory=dict)
    # The variables that the step used, the assigned ones among them, and those (by `id`) that
    # must be refs in another trace. They are placeholders in the jaxpr until `lift` makes them
    # inputs.
    touched: tuple[Variable, ...] = ()
    written: tuple[Variable, ...] = ()
    need_refs: frozenset[int] = frozenset()
    # Whether the step sees Explicit logical axes; see Note [Explicit axes in a step].
    is_explicit: bool = False
    merge_calls: tuple[str, ...] = ()  # source lines of the merge calls at the top of the step
    # Layouts that named an axis of replicas; see Note [Replica axes in layouts].
    left_out: tuple[str, ...] = ()
    # Means over replicas that have different numbers of rows.
    means: tuple[MeanOverReplicas, ...] = ()
    # The operations of one replica, if it ran op by op; then there is no `shard_map`.
    tape: Any = None

    @property
    def eqn(self) -> Any:
        """The traced `shard_map` equation."""
        return self.closed.jaxpr.eqns[-1]

    @property
    def jaxpr(self) -> Any:
        """The jaxpr of one replica, or its tape."""
        return self.eqn.params["jaxpr"] if self.tape is None else self.tape

    def call(self, leaves: Sequence[Any], out_specs: Sequence[PartitionSpec]) -> list[Any]:
        """Run on global arrays, with the results laid out by `out_specs`."""
        # The shortcut below needs constants that are arrays. An enclosing trace (`jax.jit` around
        # `strategy.run`) can make them tracers.
        params = {**self.eqn.params, "out_specs": tuple(out_specs)}
        # The shortcut does not support types with shardings, either.
        if self.is_explicit or any(isinstance(x, jax.core.Tracer) for x in self.closed.consts):
            return list(_compat.bind_like(self.eqn, self.given(leaves), params))
        parts = [_find_split_dim(spec, params["mesh"]) for spec in out_specs]
        return _compat.stage_with_params(self.closed, params, parts, leaves)

    def given(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the inputs of the jaxpr for these values of the arguments."""
        return [leaves[o] if type(o) is Argument else o for o in self.operands]


def _find_split_dim(spec: PartitionSpec, mesh: Any) -> tuple[int, int]:
    """Return the dim of a result that is split, and the number of its parts."""
    dim = max(len(spec) - 1, 0)
    axis = spec[dim] if len(spec) else None
    axes = (axis,) if isinstance(axis, str) else tuple(axis or ())
    return dim, math.prod(mesh.shape[a] for a in axes)


class Argument(int):
    """The number of an argument leaf."""


def trace(fn: Callable[..., Any], signature: Signature, strategy: HasLayout) -> TracedStep:
    """Trace `fn` under `shard_map` with the layout of `strategy`.

    With one logical device for each replica, all axes are manual, which every operation supports.
    A step that names a logical axis of size 1 in a sharding constraint is traced again, with that
    axis automatic.

    # Note [Explicit axes in a step]
    Logical axes are Auto in a step even where they are Explicit outside, so that every operation
    is accepted. A step that states the sharding of a result over such an axis (`out_sharding=`,
    `jax.sharding.reshard`) is traced again with the types of the user's mesh.
    """
    layout = strategy.layout
    partial = frozenset(layout.replica_axes)
    axes = layout.manual_axes
    is_explicit = False
    if layout.num_logical > 1:
        _compat.mend_scatters()
    while True:
        layouts = LayoutsOfReplica(layout, signature.inputs)
        try:
            traced = _trace_once(fn, signature, strategy, axes, layouts, is_explicit=is_explicit)
        except JaxdistError:
            raise
        except Exception as error:
            if is_explicit and _is_accepted_without_types(fn, signature, strategy):
                raise explicit_types_error(error, name_of(fn), layout) from error
            if not isinstance(error, ValueError):
                raise
            if needs_explicit_axes(error) and layout.has_explicit_logical_axes and not is_explicit:
                axes, is_explicit = partial, True
                continue
            if needs_explicit_axes(error):
                raise out_sharding_error(error, fn, layout) from error
            # JAX has no class for the error about an operation that names a manual axis.
            if axes == partial or "manual" not in str(error).lower():
                raise
            axes = partial
            continue
        dead = next((c for c in traced.closed.consts if is_leaked(c)), None)
        if dead is not None:
            raise closures.leak_error(fn, dead)
        check_layouts(traced.jaxpr, layout)
        if axes == partial or not names_layouts(traced.jaxpr):
            return traced
        axes = partial


def _trace_once(
    fn: Callable[..., Any],
    signature: Signature,
    strategy: HasLayout,
    axes: frozenset[str],
    layouts: LayoutsOfReplica,
    *,
    is_explicit: bool,
) -> TracedStep:
    """Trace a step with these manual axes, and with or without Explicit types."""
    variables = signature.lifting.begin()
    local = LocalStep(fn, signature, strategy, variables)
    in_specs = signature.manual_specs(strategy.layout)
    mapped = _map_over_replicas(local, in_specs, axes, strategy.layout, is_explicit)
    try:
        with _compat.rewrite_shardings(layouts, key=layouts.key):
            closed = _close(mapped, signature, is_explicit=is_explicit)
    except AttributeError as error:
        if "AbstractRef" not in str(error):
            raise
        what = f"The step {local.__name__!r} closes over a jax.Ref"
        raise ContextError(explain_ref(what)) from error
    described = local.describe(closed, _operands(closed), axes)
    finished: TracedStep = variables.finish(
        dataclasses.replace(described, is_explicit=is_explicit, left_out=tuple(layouts.left_out))
    )
    return finished


def _is_accepted_without_types(
    fn: Callable[..., Any], signature: Signature, strategy: HasLayout
) -> bool:
    """Whether JAX accepts a step if none of its layouts names an axis."""
    layout = strategy.layout
    layouts = LayoutsOfReplica(layout, signature.inputs, frozenset(layout.mesh.axis_names))
    axes = frozenset(layout.replica_axes)
    try:
        # JAX has cached the trace with the types.
        with fresh_trace_key():
            _trace_once(fn, signature, strategy, axes, layouts, is_explicit=False)
    except Exception:
        return False
    return True


def replica_axes_of(layout: ReplicaMesh) -> frozenset[str]:
    """Return the replica axes that have more than one replica."""
    return frozenset(a for a in layout.replica_axes if layout.traced_mesh.shape[a] > 1)


def input_differences(
    signature: Signature, traced: TracedStep, axes: frozenset[str]
) -> list[frozenset[str]]:
    """Return, for each input of the trace, the axes over which it may differ."""
    return [
        NONE if type(o) is not Argument else signature.inputs[o].differs(axes)
        for o in traced.operands
    ]


def trace_on_pieces(traced: TracedStep, signature: Signature, layout: ReplicaMesh) -> TracedStep:
    """Return a trace in which each replica computes with its piece of a `Sharded` array.

    Raises:
        ShardedArrayError: The step would use a piece as if it were the whole array.
    """
    axes = replica_axes_of(layout)
    if not axes or not is_marked(traced.eqn):
        return traced
    check_reduced_gradients(traced.jaxpr)
    walk = ShardingProof(layout, axes)
    differs = input_differences(signature, traced, axes)

    def replica(*local: Any) -> list[Any]:
        given = [Local(ShardFact(d), x) for d, x in zip(differs, local, strict=True)]
        pieces = LocalPieces(walk)
        return [pieces.take_mean(x).array for x in pieces.run(traced.jaxpr, given)]

    in_specs = traced.eqn.params["in_specs"]
    explicit = traced.is_explicit
    mapped = _map_over_replicas(replica, in_specs, traced.manual_axes, layout, explicit)
    closed = _close(lambda *xs: mapped(*traced.given(xs)), signature, is_explicit=explicit)
    check_results([*walk.wrong])
    return dataclasses.replace(traced, closed=closed, operands=_operands(closed))


def trace_again(
    traced: TracedStep, fn: Callable[..., list[Any]], signature: Signature, layout: ReplicaMesh
) -> TracedStep:
    """Return `traced` with the program of `fn`, from flat local values to flat local results.

    The results of `fn` have the structure and the shapes of those of `traced`.
    """
    in_specs, explicit = signature.manual_specs(layout), traced.is_explicit
    mapped = _map_over_replicas(fn, in_specs, traced.manual_axes, layout, explicit)
    closed = _close(mapped, signature, is_explicit=explicit)
    return dataclasses.replace(traced, closed=closed, operands=_operands(closed))


def _map_over_replicas(
    fn: Callable[..., list[Any]],
    in_specs: tuple[PartitionSpec, ...],
    manual_axes: frozenset[str],
    layout: ReplicaMesh,
    is_explicit: bool,
) -> Callable[..., Any]:
    """Map a function from flat local values to flat local results over the replicas."""
    return jax.shard_map(
        fn,
        mesh=layout.mesh if is_explicit else layout.traced_mesh,
        in_specs=in_specs,
        out_specs=PartitionSpec(),
        axis_names=manual_axes,
        # Gradients stay local until they are all-reduced: with `check_vma=True` the gradient with
        # respect to a replicated parameter already holds the sum over the replicas.
        check_vma=False,
    )


def _close(mapped: Callable[..., Any], signature: Signature, *, is_explicit: bool) -> Any:
    """Trace a function of all inputs of a step."""
    inputs = (
        i.abstract(on_users_mesh=True) if is_explicit else _drop_layout(i) for i in signature.inputs
    )
    closed = _compat.expand_operations(jax.make_jaxpr(mapped)(*inputs))
    # The program may be compiled later, after the caller changed the arrays in place.
    return closed.replace(consts=[copy_if_writable(c) for c in closed.consts])


def _operands(closed: Any) -> tuple[Any, ...]:
    """Return the operands of the last equation, the `shard_map`: arguments or constants."""
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    arguments = {v: Argument(i) for i, v in enumerate(closed.jaxpr.invars)}
    return tuple(
        v.val if isinstance(v, Literal) else consts[v] if v in consts else arguments[v]
        for v in closed.jaxpr.eqns[-1].invars
    )


def _drop_layout(slot: InSlot) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(slot.shape, slot.dtype, weak_type=slot.weak_type)


def name_of_result(signature: Signature, num_graph: int, paths: Sequence[str], number: int) -> str:
    """Return the name of a result: of a leaf of an NNX object, or of what the step returns."""
    if number >= num_graph:
        return paths[number - num_graph]
    size = len(signature.graph.paths) if signature.graph else 0
    return signature.graph.name(number) if signature.graph and number < size else "a variable"


class LocalStep:
    """The user's function, called with flat local values and returning flat local results."""

    def __init__(
        self, fn: Callable[..., Any], signature: Signature, strategy: HasLayout, variables: Any
    ) -> None:
        self.fn = fn
        self.signature = signature
        self.strategy = strategy
        self.variables = variables
        self.graph_size = len(signature.graph.paths) if signature.graph else 0
        self.num_graph = self.graph_size
        self.template: Any = None
        self.paths: tuple[str, ...] = ()
        self.shapes: tuple[tuple[int, ...], ...] = ()
        self.cuts: dict[int, Cut] = {}
        self._entered: list[Any] = []
        self.__name__ = name_of(fn)
        # JAX's error messages read these for the function's source line and argument names.
        self.__wrapped__ = find_function_with_source(fn)
        self.__signature__ = LeafNames(functools.partial(leaf_names, fn, signature))

    @_compat.check_constants(view=view_auto)
    def __call__(self, *leaves: Any) -> list[Any]:
        signature = self.signature
        # A scalar on each replica is one element of a global [R], so it enters as a vector.
        values = [
            x.reshape(()) if slot.is_scalar else x
            for x, slot in zip(leaves, signature.inputs, strict=True)
        ]
        values = sharded.assemble_pieces(values, signature.inputs, self.strategy.layout)
        self._entered = self._enter(values[: self.graph_size])
        nodes = signature.graph.merge(self._entered) if signature.graph else ()
        variables_before = sharded.split_variables(nodes)
        own = sharded.wrap_pieces(values, signature.inputs)[self.graph_size :]
        args, kwargs = unflatten(signature.treedef, signature.slots, own, nodes)
        context = ReplicaContext(self.strategy)
        placed = tuple((slot.shape, slot.sharding.spec) for slot in signature.inputs)
        with (
            self.variables.body(),
            enter_frame(Frame(self.strategy, context, variables=self.variables, placed=placed)),
        ):
            # Inside: a variable among the arguments is read there as the step reads it.
            bare = closures.find_bare_variables(args, kwargs)
            try:
                with (
                    closures.explain_errors(self.fn),
                    explain_methods_of_optimizers(),
                    explain_row_numbers(),
                ):
                    result = self.fn(*args, **kwargs)
            except Exception as error:
                # The argument names that the better error shows are known only here.
                better = axis_error(error, self.fn, self.strategy.layout)
                better = better or find_better_error(error, self._names_of_pieces())
                if better is None:
                    raise
                raise better from error
            closures.check_no_write_is_lost(bare, result)
            sharded.restore_nodes(variables_before, nodes, self.strategy.layout)
        self.cuts = sharded.cuts_of(signature.inputs[: self.graph_size])
        state = self._collect_state(values, nodes)
        state += self.variables.results()
        self.num_graph = len(state)
        results = [*state, *self._flatten_result(result)]
        results = self._open_pieces(results)
        self.shapes = tuple(jnp.shape(x) for x in results)
        # JAX finds a leaked tracer only when it is used, which may be here.
        try:
            return [jnp.asarray(x)[None] if jnp.ndim(x) == 0 else x for x in results]
        except ValueError as error:
            closures.raise_if_leaked(self.fn, error)
            raise

    def describe(
        self,
        closed: Any,
        operands: tuple[Any, ...],
        manual_axes: frozenset[str] = frozenset(),
        tape: Any = None,
    ) -> TracedStep:
        """Return the trace of this step, after the call that found its results."""
        return TracedStep(
            closed,
            operands,
            self.template,
            self.num_graph,
            self.paths,
            self.shapes,
            manual_axes,
            cuts=self.cuts,
            tape=tape,
        )

    def _enter(self, leaves: list[Any]) -> list[Any]:
        """Return the variables of NNX objects as this replica sees them."""
        graph, layout = self.signature.graph, self.strategy.layout
        if graph is None or layout.num_replicas == 1:
            return leaves
        pairs = zip(graph.types, leaves, strict=True)
        return [graph_rules.enter_replica(kind, leaf, layout.replica_axes) for kind, leaf in pairs]

    def _collect_state(self, values: list[Any], nodes: tuple[Any, ...]) -> list[Any]:
        """Return the values of NNX variables after the step."""
        graph, layout = self.signature.graph, self.strategy.layout
        if graph is None:
            return []
        leaves = graph.leaves_of(nodes)
        if layout.num_replicas == 1:
            return leaves
        # Not strict: `values` also holds the arguments, which come after the variables.
        rows = zip(graph.types, values, self._entered, leaves, strict=False)
        return [graph_rules.leave_replica(*row, layout.replica_axes) for row in rows]

    def _names_of_pieces(self) -> list[str]:
        graph, slots = self.signature.graph, self.signature.inputs
        return [
            graph.name(i)
            if graph and i < self.graph_size
            else f"{slots[i].dtype}{list(slots[i].shape)}, cut along dim {cut.dim}"
            for i, cut in sharded.cuts_of(slots).items()
        ]

    def _open_pieces(self, results: list[Any]) -> list[Any]:
        """Return the results, with each `Sharded` array replaced by this replica's piece."""
        layout = self.strategy.layout
        made = list(results)
        for i, cut in self.cuts.items():
            name = name_of_result(self.signature, self.num_graph, self.paths, i)
            sharded.check_piece(name, make_undeclared(results[i], cut))
            made[i] = opened_piece(results[i], cut, layout, name=name)
        return made

    @called("The step")
    def _flatten_result(self, result: Any) -> list[Any]:
        check_keys(f"{name_call()} returned", "result", result)
        result = open_result(result, _is_whole)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(result, is_leaf=_is_whole)
        marks: list[Any] = []
        arrays: list[Any] = []
        paths: list[str] = []
        for path, leaf in leaves:
            name = "result" + jax.tree_util.keystr(path)
            if isinstance(leaf, (PerReplica, nnx.Module, nnx.Optimizer)):
                raise ReplicaValueError(refused_result_message(name, leaf, name_call()))
            if isinstance(leaf, Sharded):
                if leaf.has_padding:  # The step closed over it, so nobody removed the padding.
                    leaf = make_undeclared(leaf.whole(), leaf.cut)
                sharded.check_piece(name, leaf)
                self.cuts[self.num_graph + len(arrays)] = leaf.cut
                leaf = leaf.held
            if _compat.is_mutable(leaf):
                raise ArgumentTypeError(explain_ref(f"{name_call()} returned {name}, a jax.Ref"))
            if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
                marks.append(len(arrays))
                # No operation of JAX has converted an array that the step closes over.
                arrays.append(view_auto(as_array(name, leaf)))
                paths.append(name)
            else:
                check_result("The step", name, leaf)
                marks.append(Static(leaf))
        self.template = jax.tree.unflatten(treedef, marks)
        self.paths = tuple(paths)
        return arrays


_is_whole = stops(Stop.RESULTS, *ITERABLE_LEAVES)


def _holds_arrays(container: Any) -> bool:
    return find_array(container) is not None or find_tracer(container) is not None


def check_result(what: str, name: str, leaf: Any) -> None:
    """Raise for an object that contains tracers but is not a pytree, and for an iterator."""
    where = find_tracer(leaf)
    if where is None and ends_after_one_reading(leaf):
        raise ArgumentTypeError(
            f"{what} returned a {type(leaf).__name__} as {name}.\n\n"
            "An iterator can be read only once. A result that is not an array is the same object "
            "in every call, so later calls would return an exhausted iterator.\n\n"
            "Return a list or a tuple."
        )
    if where is not None:
        raise ArgumentTypeError(hidden_tracer_message(what, name, leaf, where))


def open_result(result: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """Open those containers in the result that are not pytree nodes to JAX."""
    return open_containers(result, "result", is_leaf=is_leaf, must_open=_holds_arrays)


def refused_result_message(name: str, leaf: Any, what: str) -> str:
    """Return the message for a value that a step cannot return."""
    if isinstance(leaf, PerReplica):
        return (
            f"{what} returned a PerReplica as {name}: {leaf!r}.\n\n"
            "Inside a replica there is only its own value; a PerReplica that the function closed "
            "over cannot be seen from there.\n\n"
            "Pass it as an argument, strategy.run(fn, args=(value,)), and return the local value."
        )
    return (
        f"{what} returned an NNX object as {name}: {type(leaf).__name__}.\n\n"
        "NNX objects that are arguments are updated in place.\n\n"
        "Return arrays only; the object that you passed has the new values after the call."
    )
