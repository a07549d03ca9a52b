"""The executor of steps that run op by op, without compiling them."""

# Note [Op by op]
#
# `OpByOpStep` runs a step without `jit`. Each replica has a thread (thread_scheduler.py), in which
# the Python function runs under a trace of JAX that evaluates every operation immediately
# (replica_ops.py). One thread runs at a time. It waits at a collective until all others have
# arrived, and `Rendezvous` then computes the collective for all of them.
#
# Each replica also records its operations on a `Tape`, which looks like an open jaxpr. So the
# proofs for compiled steps (which results are equal, which are pieces) apply here too, on the
# branches that the replica took.

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.exact import same_bits
from jaxdist._program.nnx.graph_rules import Combination, combine_all
from jaxdist._program.op_by_op.rendezvous import Rendezvous
from jaxdist._program.op_by_op.replica import Replica
from jaxdist._program.op_by_op.thread_scheduler import ThreadScheduler
from jaxdist._program.proof.pieces import check_results
from jaxdist._program.proof.replication import NONE, Differs
from jaxdist._program.proof.uneven_mean import MeanOverReplicas, find_averages
from jaxdist._program.state.constant_additions import (
    check_constant_additions,
    numbers_of_metrics,
    warn_of_divided_metrics,
)
from jaxdist._program.state.no_rows import (
    check_without_rows,
    has_empty_input,
    place_of,
    replicas_with_rows,
)
from jaxdist._program.state.state import check_functional_state, find_combinations
from jaxdist._program.trace.sharded import have_equal_copies, join_pieces, pieces_of
from jaxdist._program.trace.trace import Signature, TracedStep, name_of_result, replica_axes_of
from jaxdist._program.uneven.joined_ops import Groups
from jaxdist._program.uneven.uneven import (
    check_ranks,
    find_uneven_means,
    get_signature_of_replica,
    join_templates,
)
from jaxdist._program.variables.lift import check_equal
from jaxdist._replica import HasLayout
from jaxdist._values import (
    Kind,
    PerReplica,
    Variable,
    close_containers,
    place_per_replica,
    shards_by_replica,
    view_auto,
)

# JAX compiles an operation once for each device that runs it. On platforms whose devices share one
# memory, all replicas therefore compute on the first device.
SHARES_MEMORY = frozenset({"cpu"})


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a step, before the caller writes it to variables and NNX objects."""

    state: list[Any]  # new values of the variables of NNX objects
    variables: tuple[Variable, ...]  # the variables that the step changed
    values: list[Any]  # their new values
    result: Any


class OpByOpStep:
    """One call of a step op by op; see Note [Op by op].

    Args:
        fn: The function of the user.
        signature: The signature of its arguments.
        strategy: The strategy.
        leaves: The leaves of the arguments.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: Signature,
        strategy: HasLayout,
        leaves: Sequence[Any],
    ) -> None:
        layout: ReplicaMesh = strategy.layout
        self._layout, self._signature, self._leaves = layout, signature, leaves
        own = list(layout.device_grid[:, 0])
        self._devices = [own[0]] * len(own) if layout.platform in SHARES_MEMORY else own
        columns = [self._list_local(i, leaf) for i, leaf in enumerate(leaves)]
        self._replicas = [
            Replica(number, fn, signature, strategy, device, [c[number] for c in columns])
            for number, device in enumerate(self._devices)
        ]

    def run(self, donated: Sequence[int], where: str) -> Outcome:
        """Run all replicas.

        Args:
            donated: The arguments that a compiled step would donate. Nothing is donated here, but
                donated arguments count as state in the checks.
            where: The line of the step.

        Raises:
            Exception: The exception of the step, with a note that names the replica.
            DivergentCollectiveError: The replicas did not reach the same collective.
            StateDivergenceError: The step would leave state that differs between replicas.
        """
        settings = _compat.ThreadSettings()
        dims = _compat.InferredDims()
        scheduler = ThreadScheduler(
            [functools.partial(r.run, settings, dims) for r in self._replicas],
            self._order_replicas(),
        )
        for replica in self._replicas:
            replica.ops.scheduler = scheduler
        rendezvous = Rendezvous(self._layout, self._devices)
        return self._make_outcome(scheduler.run(rendezvous.settle), donated, where)

    def _order_replicas(self) -> list[int]:
        """Return the replicas in the order in which they run: those without rows come last.

        They reuse what the others inferred from their rows (a -1 in a reshape).
        """
        count = len(self._replicas)
        has = replicas_with_rows(self._signature, count)
        return sorted(range(count), key=lambda number: has is not None and not has[number])

    def get_trace(self) -> TracedStep:
        """Return the operations of the first replica in the form of a trace."""
        return self._replicas[0].get_trace()

    def find_means(self) -> tuple[MeanOverReplicas, ...]:
        """Return the means over replicas that have different numbers of rows."""
        noted = find_averages([r.ops.log.averaged for r in self._replicas])
        taped = [r.get_trace() for r in self._replicas]
        return (*noted, *find_uneven_means(self._signature, taped, self._layout))

    def find_same_work(self) -> frozenset[int]:
        """Return the inputs that reach the results, if all replicas have done the same work."""
        axes = replica_axes_of(self._layout)
        first, *others = (r.find_same_work(axes) for r in self._replicas)
        return first.intersection(*others)

    def _list_local(self, number: int, leaf: Any) -> list[Any]:
        """Return the value of an argument for each replica."""
        leaf = view_auto(leaf)
        cut = self._signature.inputs[number].cut
        if cut is not None:
            return pieces_of(leaf, cut, self._layout)
        if self._signature.inputs[number].kind is not Kind.PER_REPLICA:
            return [leaf] * len(self._devices)
        rows: Sequence[Any]
        if self._layout.num_logical == 1:
            rows = shards_by_replica(leaf)
        else:
            size = leaf.shape[0] // self._layout.num_replicas
            rows = [leaf[r * size : (r + 1) * size] for r in range(self._layout.num_replicas)]
        # The argument was padded to one shape on all replicas: remove the padding.
        real = dict(self._signature.uneven).get(number)
        if real is not None:
            rows = [x[tuple(map(slice, shape))] for x, shape in zip(rows, real, strict=True)]
        return list(rows)

    def _make_outcome(self, rows: list[list[Any]], donated: Sequence[int], where: str) -> Outcome:
        layout, signature = self._layout, self._signature
        taped = [r.get_trace() for r in self._replicas]
        groups = Groups(tuple(range(len(taped))), layout.replica_axes)
        template = join_templates(taped, groups)
        check_ranks(taped, groups)
        # A variable that only some replicas changed needs a final value of all replicas.
        changed = list({id(v): v for r in self._replicas for v in r.variables.changed}.values())
        for replica, row in zip(self._replicas, rows, strict=True):
            replica.finish(row, changed)
        axes = replica_axes_of(layout)
        self._check_rows(taped)
        differs = [bool(d) for d in self._find_differing_axes(axes)]
        columns = [list(c) for c in zip(*(r.finals for r in self._replicas), strict=True)]
        count = len(taped[0].shapes)
        of_results, of_variables = differs[:count], differs[count:]
        first = dataclasses.replace(taped[0], template=template)
        of_results = [d and i not in first.cuts for i, d in enumerate(of_results)]
        combined: list[Combination] = []
        if axes:
            # The step may use pieces of arrays only where they equal the whole arrays.
            for replica in self._replicas:
                check_results(replica.find_wrong_pieces(axes))
            num_replicas = layout.num_replicas
            # Python code decides on each replica which metrics it updates, so take the
            # combinations of all replicas.
            has = replicas_with_rows(signature, num_replicas)
            found = [
                find_combinations(signature, t, of_results, num_replicas, [place_of(r, layout)])
                for r, t in enumerate(taped)
                if has is None or has[r] or not any(has)
            ]
            combined = list(dict.fromkeys(c for one in found for c in one))
            # Replicas without rows divide nothing.
            with_rows = has.index(True) if has is not None and any(has) else 0
            warn_of_divided_metrics(signature, taped[with_rows], axes, num_replicas, where)
            check_functional_state(signature, first, of_results, donated, num_replicas, where)
            check_equal(changed, of_variables, num_replicas)
            old = self._replicas[0].old_metrics
            check_constant_additions(changed, first, old, count, axes, num_replicas)
        # A tape does not record decisions in Python.
        check_results(
            [
                name_of_result(signature, first.num_graph, first.paths, i)
                for i, cut in first.cuts.items()
                if not have_equal_copies(columns[i], cut, layout)
            ]
        )
        made = self._combine(combined, columns)
        joined = {i: join_pieces(columns[i], cut, layout) for i, cut in first.cuts.items()}
        state = [
            joined[i] if i in joined else self._place_state(i, made.get(i, columns[i][0]))
            for i in range(first.num_graph)
        ]
        results = [
            joined[i]
            if i in joined
            else self._place_result(columns[i], first.shapes[i] == (), is_equal=not of_results[i])
            for i in range(first.num_graph, count)
        ]
        values = [
            self._place_variable(*pair) for pair in zip(changed, columns[count:], strict=True)
        ]
        result = close_containers(jax.tree.map(lambda number: results[number], template))
        return Outcome(state, tuple(changed), values, result)

    def _check_rows(self, taped: Sequence[TracedStep]) -> None:
        """Check that no mean over no rows, from a replica without rows, reached other replicas."""
        count = self._layout.num_replicas
        for replica, tape in enumerate(taped):
            own = get_signature_of_replica(self._signature, replica, count)
            if count > 1 and has_empty_input(own, count):
                check_without_rows(self._signature, own, tape, [replica], self._layout)

    def _find_differing_axes(self, axes: Differs) -> list[Differs]:
        """Return for each result and each changed variable the axes over which it may differ."""
        found = [r.differs(axes) for r in self._replicas]
        joined = [NONE.union(*column) for column in zip(*found, strict=True)]
        # A tape does not record decisions in Python, so also compare the bits.
        finals = zip(*(r.finals for r in self._replicas), strict=True)
        return [
            d if d or same_bits(column) else axes for d, column in zip(joined, finals, strict=True)
        ]

    def _place_result(self, column: list[Any], is_scalar: bool, *, is_equal: bool) -> Any:
        """Place one result of all replicas on the devices of the strategy."""
        layout = self._layout
        values = [x.reshape(()) for x in column] if is_scalar else column
        shapes = {x.shape for x in values}
        if is_equal and len(shapes) == 1:
            return jax.device_put(values[0], layout.replicated)
        if len(shapes) == 1:
            return place_per_replica("result", PerReplica(values), layout)
        own = layout.device_grid[:, 0]
        return PerReplica([jax.device_put(x, d) for x, d in zip(values, own, strict=True)])

    def _combine(self, combined: Sequence[Combination], columns: list[list[Any]]) -> dict[int, Any]:
        """Combine the variables whose new values differ; return the combined values by number."""
        layout, first = self._layout, self._devices[0]
        takes_part = replicas_with_rows(self._signature, layout.num_replicas)
        from_zero = frozenset(numbers_of_metrics(combined))
        sizes = [layout.mesh.shape[a] for a in layout.replica_axes]
        made: dict[int, Any] = {}
        for c in combined:
            here = SingleDeviceSharding(first)
            before = [jax.device_put(self._leaves[i], here) for i in c.numbers]
            after = [
                [r.from_zero(i) for r in self._replicas] if i in from_zero else columns[i]
                for i in c.numbers
            ]
            moved = [[jax.device_put(x, first) for x in column] for column in after]
            values = combine_all(c, before, moved, sizes, layout.replica_axes, takes_part)
            made.update(zip(c.numbers, values, strict=True))
        return made

    def _place_state(self, number: int, value: Any) -> Any:
        """Return the new value of one leaf of an NNX object, in its former shape and sharding."""
        slot = self._signature.inputs[number]
        return jax.device_put(value.reshape(slot.shape), slot.sharding)

    def _place_variable(self, variable: Variable, copies: list[Any]) -> Any:
        """Return the array for a changed variable, on the devices of the variable."""
        home = variable.home
        if home.per_replica and home.layout is not None:
            return place_per_replica("value", PerReplica(copies), home.layout).array
        return jax.device_put(jnp.asarray(copies[0]), home.sharding or self._layout.replicated)
