"""One function under one strategy: its programs, and the fast way into them."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdist import _compat
from jaxdist.errors import ArgumentError, ContextError, DonationError, ShapeError
from jaxdist.mesh import ReplicaMesh
from jaxdist.program import _options
from jaxdist.program._arguments import (
    Flat,
    GraphNode,
    Static,
    argument_name,
    check_hashable,
    check_no_bare_variable,
    flatten,
    is_unit,
)
from jaxdist.program._build import build
from jaxdist.program._deleted import deleted_arguments, guarded, was_given_away
from jaxdist.program._difference import difference
from jaxdist.program._donation import DonatingCall, may_crash
from jaxdist.program._graph import KeptGraph
from jaxdist.program._op_by_op import OpByOpStep
from jaxdist.program._planned import Plan, Planned, Slow
from jaxdist.program._program import Program
from jaxdist.program._retrace import RetraceWatch, place
from jaxdist.program._trace import InSlot, Signature
from jaxdist.program._uneven import padded, uneven_shapes
from jaxdist.program._variables_lift import NO_VARIABLES, LiftedVariables
from jaxdist.program._virtual_limits import (
    check_compiled,
    check_inside_trace,
    not_differentiable,
)
from jaxdist.runtime import CPU_STEPS
from jaxdist.values import (
    Form,
    Kind,
    PerReplica,
    Sharded,
    check_virtual_rows,
    checked_per_replica,
    checked_sharded,
    current_binding,
    placement_of,
    sharded_placement,
)

# Lists of variables hold them, so only those of the last few models that a step ran on are kept.
MAX_KEPT_GRAPHS = 8


@dataclasses.dataclass
class _Ready:
    """A program with its executable, and what the C++ call path needs (made at the first call)."""

    program: Program
    compiled: jax.stages.Compiled
    record: Any = None
    has_record: bool = False


@dataclasses.dataclass
class _Call:
    """One call, taken apart and read against the strategy."""

    flat: Flat
    signature: Signature
    leaves: list[Any]
    kept: KeptGraph | None
    moved: bool  # some leaf is not passed on as it came


class Step:
    """Runs one function. `call` is the way in; it changes as more is known of the arguments."""

    def __init__(
        self,
        fn: Callable[..., Any],
        options: _options.RunOptions,
        strategy: Any,
        watch: RetraceWatch,
    ) -> None:
        self._fn = weakref.ref(fn) if type(fn).__name__ == "function" else (lambda: fn)
        self._options = options
        self._strategy = weakref.ref(strategy)
        self._layout: ReplicaMesh = strategy.layout
        self._watch = watch
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self._static_names = frozenset(options.static_argnames)
        self._static_numbers = _options.static_numbers(fn, options.static_argnames)
        self._programs: dict[Signature, _Ready] = {}
        # Traced by `program` and not compiled yet.
        self._only_traced: dict[Signature, Program] = {}
        self._kept: dict[tuple[int, ...], KeptGraph] = {}
        self._planned: dict[tuple[Plan, int], Planned] = {}
        # The variables that the last program touched; the next one probably does as well.
        self._variables = NO_VARIABLES
        self._bounded = False
        self._dispatcher = _compat.make_dispatcher(self.name, self._miss)
        # Whether the call paths look for deleted buffers, since JAX would look too late.
        self.finds_deleted = bool(options.donate_argnums) and may_crash(self._layout)
        self._donating = DonatingCall(
            self._dispatcher,
            self.slow,
            one_device=len(self._layout.devices) == 1,
            finds_deleted=self.finds_deleted,
        )
        self.direct: Callable[..., Any] = (
            self._donating if options.donate_argnums else self._dispatcher
        )
        self.call: Callable[..., Any] = self.direct
        if options.static_argnames:
            self.call = self.slow

    # The slow way: read everything, pick or build the program.

    def slow(self, *args: Any, **kwargs: Any) -> Any:
        """Run without the C++ call path."""
        return self._miss(args, kwargs)[0]

    def _miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        call = self._read(args, kwargs)
        if call.flat.has_tracer or _compat.inside_trace():
            return self._inside_trace(call, (args, kwargs)), None
        self._layout.check_is_there("strategy.run")
        if _compat.is_disabled_jit():
            return self._op_by_op(call, args), None
        ready = self._programs.get(call.signature)
        if ready is None:
            ready = self._new_program(call, (args, kwargs))
        variables = ready.program.variables
        leaves = variables.around(call.leaves) if variables else call.leaves
        if _compat.any_deleted(leaves):
            self.check_deleted(args, kwargs)
        self._check_donation(leaves, ready.program)
        self._donating.see(args, kwargs)
        CPU_STEPS.make_room()
        results = ready.compiled(*leaves)
        if not ready.has_record:
            ready.record = _compat.fast_call_record(
                ready.compiled, len(leaves), results, ready.program.template
            )
            ready.has_record = True
        rebuilt = ready.program.rebuild(results)
        if ready.program.has_state:
            state, result = rebuilt
            if call.kept is not None:
                call.kept.write(state[: variables.after] if variables else state)
            if variables:
                variables.write(state[variables.after :])
        else:
            result = rebuilt
        self._count_in_flight(ready.program, results)
        plain = not call.flat.nodes and not any(isinstance(s, Static) for s in call.flat.slots)
        if variables or not plain:
            self._plan(call, args, kwargs, variables)
            return result, None
        return result, None if call.moved else ready.record

    def op_by_op(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run as JAX runs operations outside of `jit`, one thread for each replica."""
        call = self._read(args, kwargs)
        if call.flat.has_tracer or _compat.inside_trace():
            return self._inside_trace(call, (args, kwargs))
        self._layout.check_is_there("strategy.run")
        if _compat.any_deleted(call.leaves):
            self.check_deleted(args, kwargs)
        return self._op_by_op(call, args)

    def check_deleted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise an error that names the arguments whose buffers are gone, if there are any."""
        flat = flatten(args, kwargs, self._static_names, self._static_numbers)
        kept = self._graph_of(flat, (args, kwargs)) if flat.nodes else None
        state = kept.read() if kept else []
        name = kept.shape.name if kept else str
        names = deleted_arguments(flat, (args, kwargs), name, state)
        if names:
            raise was_given_away(self.name, names, self._options.donate_argnums)

    def guard(self) -> None:
        """Look for deleted buffers from now on: another step of the strategy donates some."""
        if self.finds_deleted:
            return
        self.finds_deleted = True
        inner = self.direct
        self.direct = guarded(inner, self.slow)
        if self.call is inner:
            self.call = self.direct

    def _op_by_op(self, call: _Call, args: tuple[Any, ...]) -> Any:
        check_compiled(self._layout)
        fn: Any = self._fn()
        self._check_numbers(args)
        with _compat.with_jit():
            step = OpByOpStep(fn, call.signature, self._strategy(), call.leaves)
            outcome = step.run(self._options.donate_argnums, place(fn))
        variables = LiftedVariables(outcome.variables, (), 0, {})
        try:
            if call.kept is not None:
                call.kept.write(outcome.state)
        finally:
            variables.write(outcome.values)
        return outcome.result

    def _count_in_flight(self, program: Program, results: Any) -> None:
        layout = self._layout
        if layout.platform != "cpu" or len(layout.devices) < 2:
            return
        if program.traced_collectives or layout.num_logical > 1:
            CPU_STEPS.dispatched(results)
            if not self._bounded:
                self._bounded = True
                self._bound_direct()

    def _bound_direct(self) -> None:
        inner = self.direct

        def bounded(*args: Any, **kwargs: Any) -> Any:
            CPU_STEPS.make_room()
            results = inner(*args, **kwargs)
            CPU_STEPS.dispatched(results)
            return results

        self.direct = bounded
        if self.call is inner:
            self.call = bounded

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        flat = flatten(args, kwargs, self._static_names, self._static_numbers)
        check_hashable("strategy.run", flat, (args, kwargs))
        check_no_bare_variable("strategy.run", args, kwargs)
        kept = self._graph_of(flat, (args, kwargs)) if flat.nodes else None
        leaves = kept.read() if kept else []
        moved = False
        uneven: list[tuple[int, Any]] = []
        misfits: list[ShapeError] = []
        for number, leaf in enumerate(flat.dynamic):
            if isinstance(leaf, PerReplica):
                shapes = None if leaf.is_global else uneven_shapes(leaf, self._layout)
                if shapes is not None:
                    uneven.append((len(leaves), shapes))
                    leaf = padded(leaf, shapes, self._layout)
                name = _ArgumentName(flat, number, (args, kwargs))
                try:
                    checked = checked_per_replica(name, leaf, self._layout)
                except ShapeError as error:
                    misfits.append(error)
                    checked = leaf
                moved = moved or checked is not leaf or shapes is not None
                leaf = checked
            leaves.append(leaf)
        if misfits:
            raise _together(misfits)
        inputs = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Sharded):
                before = len(leaves) - len(flat.dynamic)
                of_call: Any = _ArgumentName(flat, i - before, (args, kwargs))
                name = kept.shape.name(i) if kept and i < before else of_call
                checked_pieces = checked_sharded(name, leaf, self._layout)
                moved = moved or checked_pieces is not leaf
                leaf = checked_pieces
            slot = _in_slot(leaf, self._layout)
            inputs.append(slot)
            is_virtual = self._layout.num_virtual is not None
            if is_virtual and slot.kind is Kind.PER_REPLICA and not isinstance(leaf, PerReplica):
                name = _ArgumentName(flat, i - (len(leaves) - len(flat.dynamic)), (args, kwargs))
                check_virtual_rows(name, leaf, self._layout)
            leaf = leaf.array if isinstance(leaf, (PerReplica, Sharded)) else leaf
            if _must_move(leaf, slot) and self._layout.described is None:
                leaf, moved = jax.device_put(leaf, slot.sharding), True
            leaves[i] = leaf
        graph = kept.shape if kept else None
        signature = Signature(flat.treedef, flat.slots, tuple(inputs), graph, uneven=tuple(uneven))
        return _Call(flat, signature, leaves, kept, moved)

    def _graph_of(self, flat: Flat, given: tuple[Any, Any]) -> KeptGraph:
        key = tuple(id(n) for n in flat.nodes)
        kept = self._kept.get(key)
        if kept is None or not kept.is_current():
            held = self._kept
            names: dict[int, str] = {}
            for path, slot in zip(self._paths(given), flat.slots, strict=True):
                if isinstance(slot, GraphNode):
                    names.setdefault(slot.index, argument_name(path))
            arguments = tuple(names[i] for i in range(len(names)))
            kept = KeptGraph(tuple(flat.nodes), arguments, lambda _: held.pop(key, None))
            if len(self._kept) >= MAX_KEPT_GRAPHS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = kept
        return kept

    # Programs.

    def program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """The program that this call would run."""
        call = self._read(args, kwargs)
        ready = self._programs.get(call.signature)
        if ready is not None:
            return ready.program
        known = self._only_traced.get(call.signature)
        if known is not None:
            return known
        program = self._build(call, (args, kwargs))
        if not (call.flat.has_tracer or _compat.inside_trace()):
            self._only_traced[call.signature] = program
        return program

    def _new_program(self, call: _Call, given: tuple[Any, Any]) -> _Ready:
        fn = self._fn()
        program = self._only_traced.pop(call.signature, None) or self._build(call, given)
        if self._programs:
            last = next(reversed(self._programs))
            changed = difference(last, call.signature, self._names(call, given))
            self._watch.new_program(fn, len(self._programs) + 1, changed)
        else:
            self._watch.new_function(fn)
        ready = _Ready(program, program.compiled())
        self._programs[call.signature] = ready
        return ready

    def _build(self, call: _Call, given: tuple[Any, Any]) -> Program:
        fn: Any = self._fn()
        donated_args = self._options.donate_argnums
        self._check_numbers(given[0])
        program = build(
            fn,
            call.signature,
            self._strategy(),
            self._names(call, given),
            donated_args,
            self._donated_leaves(call, given),
            place(fn),
            self._variables,
        )
        if program.variables:
            self._variables = program.variables
        return program

    def _check_numbers(self, args: tuple[Any, ...]) -> None:
        donated_args = self._options.donate_argnums
        out_of_range = [n for n in donated_args if not 0 <= n < len(args)]
        if out_of_range:
            raise ArgumentError(
                f"RunOptions(donate_argnums={donated_args}): the step was called with "
                f"{len(args)} positional argument(s), numbered from 0.\n\n"
                f"Leave out {out_of_range}; keyword arguments cannot be donated."
            )

    def _names(self, call: _Call, given: tuple[Any, Any]) -> list[str]:
        paths = self._paths(given)
        return [
            argument_name(p)
            for p, s in zip(paths, call.flat.slots, strict=True)
            if not isinstance(s, (Static, GraphNode))
        ]

    def _paths(self, given: tuple[Any, Any]) -> list[Any]:
        whole = (
            tuple(Static(a) if i in self._static_numbers else a for i, a in enumerate(given[0])),
            {k: Static(v) if k in self._static_names else v for k, v in given[1].items()},
        )
        return [p for p, _ in jax.tree_util.tree_flatten_with_path(whole, is_leaf=is_unit)[0]]

    def _donated_leaves(self, call: _Call, given: tuple[Any, Any]) -> list[int]:
        if not self._options.donate_argnums:
            return []
        graph = call.signature.graph
        offset = len(graph.paths) if graph else 0
        donated: list[int] = []
        for path, slot in zip(self._paths(given), call.flat.slots, strict=True):
            if path[0].idx != 0 or path[1].idx not in self._options.donate_argnums:
                continue
            if isinstance(slot, GraphNode) and graph is not None:
                donated += [i for i, p in enumerate(graph.paths) if p[0] == slot.index]
            elif not isinstance(slot, Static):
                donated.append(offset + slot)
        return donated

    def _check_donation(self, leaves: Sequence[Any], program: Program) -> None:
        if not program.donated:
            return
        names = program.input_names
        seen: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, jax.Array):
                continue
            first = seen.setdefault(id(leaf), i)
            if first != i and (i in program.donated or first in program.donated):
                raise DonationError(
                    f"strategy.run would donate one array twice: {names[first]} and {names[i]} are "
                    "the same buffer.\n\n"
                    "A donated buffer is given to the results, so nothing else may use it.\n\n"
                    f"Copy one of them first (jnp.copy), or leave it out of donate_argnums "
                    f"{self._options.donate_argnums}."
                )

    # Inside somebody else's trace there are no layouts to read, and nothing to compile.

    def _inside_trace(self, call: _Call, given: tuple[Any, Any]) -> Any:
        check_inside_trace(self._layout)
        program = self._build(call, given)
        variables = program.variables
        if variables and current_binding() is None:
            raise ContextError(_variables_inside_trace(variables))
        leaves = variables.around(call.leaves) if variables else call.leaves
        is_virtual = self._layout.num_virtual is not None
        inner = not_differentiable(program.call) if is_virtual else program.call
        if self._layout.num_logical > 1:
            # Under `grad` alone JAX would run it operation by operation, and cannot where some
            # axes are manual and others are not.
            inner = jax.jit(inner)
        rebuilt = program.rebuild(inner(*leaves))
        if not program.has_state:
            return rebuilt
        state, result = rebuilt
        if call.kept is not None:
            call.kept.write(state[: variables.after] if variables else state)
        if variables:
            variables.write(state[variables.after :])
        return result

    # Static arguments and NNX objects are taken out before the C++ call path.

    def _plan(
        self,
        call: _Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        variables: LiftedVariables,
    ) -> None:
        """From now on, take out the arguments at the places where this call had such ones."""
        plan = self._plan_of(call, args, kwargs)
        if plan is not None:
            key = (plan, id(variables))
            self.call = self._planned.setdefault(key, Planned(self, plan, variables))
        elif variables:
            self.call = self.slow

    def _plan_of(self, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
        return Plan.of(call.flat, args, kwargs, self._static_numbers, self._static_names)

    def dispatcher_for(
        self, plan: Plan, variables: LiftedVariables, restore: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A C++ dispatcher for calls that were taken apart by a plan."""

        def miss(given: tuple[Any, ...], _: dict[str, Any]) -> tuple[Any, Any]:
            args, kwargs = restore(given[2], given[3])
            call = self._read(args, kwargs)
            ready = self._programs.get(call.signature)
            traced = call.flat.has_tracer or _compat.must_interpret()
            # A number where there was a static value is an argument of the program, and is not
            # among what this dispatcher was given.
            fits = self._plan_of(call, args, kwargs) == plan
            if ready is None or traced or call.moved or not fits:
                return Slow(), None
            if ready.program.variables is not variables:
                return Slow(), None
            leaves = variables.around(call.leaves) if variables else call.leaves
            self._check_donation(leaves, ready.program)
            results = ready.compiled(*leaves)
            record = ready.record if ready.has_record else None
            return ready.program.rebuild(results), record

        return _compat.make_dispatcher(self.name, miss)

    @property
    def donates(self) -> bool:
        """Whether arguments are given to the results."""
        return bool(self._options.donate_argnums)

    @property
    def bounded(self) -> bool:
        """Whether the steps in flight have to be counted."""
        return self._bounded

    def kept_for(self, nodes: Sequence[Any]) -> KeptGraph | None:
        """The kept list of these NNX objects, if it is still right."""
        kept = self._kept.get(tuple(id(n) for n in nodes))
        return kept if kept is not None and kept.is_current() else None


@dataclasses.dataclass
class _ArgumentName:
    """The name of a leaf, found only when a message needs it."""

    flat: Flat
    number: int
    call: tuple[Any, Any]

    def __str__(self) -> str:
        return self.flat.path(self.number, self.call)


def _variables_inside_trace(variables: LiftedVariables) -> str:
    names = [u.variable.label for u in variables.uses.values()]
    return (
        f"strategy.run was called inside another function that JAX is tracing (jax.jit, scan, "
        f"grad), and its step uses {len(names)} variable(s): {names[:5]}.\n\n"
        "The traced function would keep the values that they have now, and assignments would be "
        "lost.\n\n"
        "Decorate that function with jaxdist.function instead of jax.jit, or call strategy.run "
        "outside and put what is around it into the step."
    )


def _together(errors: list[ShapeError]) -> ShapeError:
    """One error for all arguments that do not fit, with what the first one advises."""
    if len(errors) == 1:
        return errors[0]
    found = [str(error).partition("\n\n") for error in errors]
    return ShapeError("\n".join(first for first, _, _ in found) + f"\n\n{found[0][2]}")


def _in_slot(leaf: Any, layout: ReplicaMesh) -> InSlot:
    if isinstance(leaf, Sharded):
        held = leaf.held
        placement = sharded_placement(leaf, layout)
        return InSlot(placement, tuple(held.shape), held.dtype, False, False, leaf.cut)
    placement = placement_of(leaf, layout)
    scalar = isinstance(leaf, PerReplica) and leaf.form is Form.SCALARS
    array = leaf.array if isinstance(leaf, PerReplica) else leaf
    if isinstance(array, (jax.Array, jax.ShapeDtypeStruct)):
        weak = bool(getattr(array, "weak_type", False))
        return InSlot(placement, tuple(array.shape), array.dtype, weak, scalar)
    aval = jax.typeof(array)
    return InSlot(placement, tuple(aval.shape), aval.dtype, bool(aval.weak_type), scalar)


def _must_move(leaf: Any, slot: InSlot) -> bool:
    """Whether an array is tied to devices or a layout that the program does not take."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    if not _compat.is_committed(leaf):
        return False
    return not leaf.sharding.is_equivalent_to(slot.sharding, leaf.ndim)
