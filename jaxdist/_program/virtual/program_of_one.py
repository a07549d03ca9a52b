"""Evaluation of a step, traced for one virtual replica, for all virtual replicas of a device."""

# Note [Virtual replicas]
#
# With `deterministic=True` a strategy has V virtual replicas on R devices, and the results have
# the same bits for every R. A step is traced as one of V replicas sees it (trace.py). `_Run` cuts
# the trace at its collectives. Between two collectives it computes values that are equal on all
# replicas once (`Same`). It computes all others in a loop, one virtual replica after the other
# (`Own`). So each operation has the same shapes for every number of devices.
#
# XLA's fusion decides how products and sums are rounded. An optimization barrier at each cut
# keeps XLA from fusing across it, so that fusion, too, is the same for every number of devices.
# Collectives add in the order of one binary tree over the V replicas (collectives.py).

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._called import called, refuse
from jaxdist._collectives import ASSUME_REPLICATED
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.control_flow import Scan, While
from jaxdist._program.jaxprs.subprograms import open_jaxpr
from jaxdist._program.proof.replication import NONE, Differs, analyse_equation
from jaxdist._program.uneven.joined_ops import Const, Key, Op, flatten_ops
from jaxdist._program.virtual.collectives import add_over_replicas, is_sum, run_collective
from jaxdist._program.virtual.device import (
    Own,
    Same,
    VirtualDevice,
    barrier,
    evaluate_operation,
    get_literal,
    has_replica_number,
    is_over_replicas,
)
from jaxdist.errors import UnsupportedError


def run_virtually(
    program: Any, arguments: Sequence[Same | Own], device: VirtualDevice
) -> list[Same | Own]:
    """Evaluate an open or closed program of one replica for all of them, inside `shard_map`.

    Raises:
        UnsupportedError: The program has an operation that virtual replicas do not support.
    """
    return _Run(program, arguments, device).run()


# Calls that are inlined, since some of their results may be equal on all replicas, and others not.
# A rematerialised call stays a call, or XLA would compute its values only once.
_INLINED = frozenset(known.CALLS) - {"remat", "remat2", "checkpoint", "shard_map"}


class _Run:
    """One evaluation of a program.

    `values` has the values that are computed. `pending` has operations that will run in the next
    loop over the virtual replicas. `finished` has collectives that ran together with earlier ones.
    """

    def __init__(
        self, program: Any, arguments: Sequence[Same | Own], device: VirtualDevice
    ) -> None:
        self.device = device
        invars = open_jaxpr(program).invars
        keys = [Key(v.aval) for v in invars]
        self.ops, self.results = flatten_ops(program, list(keys), inlined=_INLINED)
        self.values: dict[Key, Same | Own] = dict(zip(keys, arguments, strict=True))
        self.differs: dict[Key, Differs] = {
            k: device.axes if isinstance(x, Own) else NONE for k, x in self.values.items()
        }
        self.pending: list[Op] = []
        self.finished: set[int] = set()
        self.last_read: dict[Key, int] = {}
        for number, op in enumerate(self.ops):
            self.last_read.update((a, number) for a in op.inputs if isinstance(a, Key))
        end = len(self.ops)
        self.last_read.update((a, end) for a in self.results if isinstance(a, Key))

    def run(self) -> list[Same | Own]:
        for number, op in enumerate(self.ops):
            came_in = [self.differs[a] if isinstance(a, Key) else NONE for a in op.inputs]
            differs = analyse_equation(op.eqn, came_in, self.device.axes)
            self.differs.update(zip(op.outputs, differs, strict=True))
            # The user states that the replicas are equal: take the row of the first, as one value.
            if op.eqn.primitive is ASSUME_REPLICATED:
                self._store_same(op, map(self.device.get_one, self._read(op, number)))
            elif id(op) in self.finished:
                continue
            elif is_sum(op.eqn) and self._must_communicate(op):
                self._run_sums(number)
            elif op.has_collective and self._must_communicate(op):
                outputs = self._run_collective(op, self._read(op, number), differs)
                self.values.update(zip(op.outputs, outputs, strict=True))
            elif any(came_in) or any(differs):
                self.pending.append(op)
            else:
                values = list(map(self.device.get_one, self._read(op, number)))
                self._store_same(op, evaluate_operation(op.eqn, values, None, self.device))
        results = [self._value(a, len(self.ops)) for a in self.results]
        # Nobody reads the results of a debug.print, but it must still run.
        if any(op.eqn.effects for op in self.pending):
            self._run_pending(len(self.ops))
        return results

    def _must_communicate(self, op: Op) -> bool:
        return op.name not in known.COLLECTIVES or is_over_replicas(op.eqn, self.device)

    def _value(self, atom: Any, number: int) -> Same | Own:
        """Return a value that operation `number` reads; compute it first if it is pending."""
        if isinstance(atom, Literal):
            return Same(get_literal(atom))
        if isinstance(atom, Const):
            return Same(atom.value)
        if atom not in self.values:
            self._run_pending(number)
        return self.values[atom]

    def _read(self, op: Op, number: int) -> list[Same | Own]:
        """Return the operands of an operation for operation `number`, which may be another one."""
        return [self._value(a, number) for a in op.inputs]

    def _store_same(self, op: Op, values: Iterable[Any]) -> None:
        self.values.update(zip(op.outputs, map(Same, values), strict=True))

    # The loop over virtual replicas

    def _run_pending(self, number: int) -> None:
        """Run the pending operations, one replica after the other.

        Args:
            number: The next operation. Only results that it or later ones read leave the loop.
        """
        device, pending = self.device, self.pending
        self.pending = []
        made = {k for op in pending for k in op.outputs}
        read = [k for k in _list_keys(a for op in pending for a in op.inputs) if k not in made]
        wanted = [k for op in pending for k in op.outputs if self.last_read.get(k, -1) >= number]
        own = [k for k in read if isinstance(self.values[k], Own)]
        same = [k for k in read if isinstance(self.values[k], Same)]
        constants = [jnp.asarray(device.get_one(self.values[k])) for k in same]
        asks = any(has_replica_number(op.eqn, device) for op in pending)

        def run_replica(_: None, given: tuple[list[Any], Any]) -> tuple[None, list[Any]]:
            rows, held, replica = barrier((given[0], constants, given[1]))
            env = dict(zip((*own, *same), (*rows, *held), strict=True))

            def value(atom: Any) -> Any:
                if isinstance(atom, Key):
                    return env[atom]
                return atom.value if isinstance(atom, Const) else get_literal(atom)

            for op in pending:
                results = evaluate_operation(op.eqn, [value(a) for a in op.inputs], replica, device)
                env.update(zip(op.outputs, results, strict=True))
            return None, barrier([env[k] for k in wanted])

        stacks = [device.rows(self.values[k]) for k in own], device.get_numbers() if asks else None
        results = _loop_over_rows(run_replica, stacks, device.num_local)
        for key, rows in zip(wanted, results, strict=True):
            self.values[key] = Own(rows) if self.differs[key] else Same(rows[0])

    # Collectives

    def _run_sums(self, number: int) -> None:
        """Compute a sum over all replicas, together with later sums whose operands are ready.

        One exchange for all of them is faster, and does not change the order of any sum.
        """
        given = self._read(self.ops[number], number)
        ops = [self.ops[number]]
        for op in self.ops[number + 1 :]:
            keys = [a for a in op.inputs if isinstance(a, Key)]
            if (
                is_sum(op.eqn)
                and self._must_communicate(op)
                and all(k in self.values for k in keys)
            ):
                ops.append(op)
                given += self._read(op, number)
        sums = iter(add_over_replicas(given, self.device))
        for op in ops:
            self.finished.add(id(op))
            self.values.update((k, next(sums)) for k in op.outputs)
            self.differs.update((k, NONE) for k in op.outputs)

    @called("strategy.run of a strategy with deterministic=True")
    def _run_collective(
        self, op: Op, held: list[Same | Own], differs: list[Differs]
    ) -> list[Same | Own]:
        if op.name in known.COLLECTIVES:
            return run_collective(op.eqn, held, self.device)
        if op.name in LOOPS:
            return LOOPS[op.name](op.eqn, held, differs, self.device)
        raise refuse(
            f"a step that has a {op.name} with a collective in it, at "
            f"{_compat.find_source(op.eqn)}.",
            "Such a step may have collectives in scan, while_loop, fori_loop, cond, switch, jit "
            "and checkpoint.",
            "Take the collective out of it, or leave deterministic out.",
            kind=UnsupportedError,
        )


def _loop_over_rows(
    run_replica: Callable[[None, Any], tuple[None, list[Any]]], stacks: Any, count: int
) -> Any:
    """Return the stacked results of `run_replica` for each row of `stacks`.

    It is a loop even for one row. XLA unrolls a loop with one iteration, and removes the selection
    of the only row. It would then fuse the operations that read the row differently than in a
    longer loop. So a single row is doubled here, and XLA does not know the number of iterations.
    """
    if count > 1:
        return jax.lax.scan(run_replica, None, stacks, length=count)[1]
    two = jax.tree.map(lambda x: barrier(jnp.concatenate([x, x])), stacks)

    def row(i: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), two)

    shapes = jax.eval_shape(lambda: run_replica(None, row(0))[1])
    # The barrier hides the number of iterations from XLA.
    last = barrier(jnp.int32(1))

    def body(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        i, made = state
        own = run_replica(None, row(i))[1]
        return i + 1, [
            jax.lax.dynamic_update_index_in_dim(m, x, i, 0) for m, x in zip(made, own, strict=True)
        ]

    # `jnp.zeros` does not support random keys.
    start = [jax.lax.full((1, *s.shape), 0, s.dtype) for s in shapes]
    return jax.lax.while_loop(lambda s: s[0] < last, body, (jnp.int32(0), start))[1]


def _list_keys(atoms: Iterable[Any]) -> list[Key]:
    """Return the keys among the atoms without duplicates, in order."""
    return list(dict.fromkeys(a for a in atoms if isinstance(a, Key)))


# Loops and branches with collectives
#
# The loop stays a loop, and its body is cut at its collectives like the step itself. A part of the
# carry is one value (`Same`) if the analysis proves that it is equal on all replicas in every
# iteration. Otherwise it is one row for each replica (`Own`). Each function gets `differs`, the
# analysis's facts about the results: the form of a carry must be known before JAX traces the body.

Held: TypeAlias = Sequence[Same | Own]


def _get_array(held: Same | Own) -> Any:
    return held.rows if isinstance(held, Own) else jnp.asarray(held.value)


def _wrap(values: Sequence[Any], differs: Sequence[Any]) -> list[Same | Own]:
    return [Own(v) if d else Same(v) for v, d in zip(values, differs, strict=True)]


def _unwrap(held: Held, differs: Sequence[Any], device: VirtualDevice) -> list[Any]:
    """Return the array of each value: a row for each replica if it differs, else one value."""
    return [
        device.rows(x) if d else jnp.asarray(device.get_one(x))
        for x, d in zip(held, differs, strict=True)
    ]


def _scan(eqn: Any, held: Held, differs: list[Differs], device: VirtualDevice) -> list[Same | Own]:
    loop = Scan.of(eqn.params)
    consts, start, over = loop.split(held)
    state, of_rows = differs[: loop.num_carry], differs[loop.num_carry :]
    given = [*state, *(isinstance(x, Own) for x in over)]

    def body(values: list[Any]) -> list[Any]:
        inputs = [*consts, *_wrap(values, given)]
        return _unwrap(run_virtually(loop.program, inputs, device), differs, device)

    # [iteration, replica, ...], since a scan iterates over dim 0.
    arrays = [jnp.moveaxis(x.rows, 1, 0) if isinstance(x, Own) else _get_array(x) for x in over]
    results = loop.run(body, _unwrap(start, state, device), arrays)
    stacked = zip(results[loop.num_carry :], of_rows, strict=True)
    rows = [jnp.moveaxis(x, 0, 1) if d else x for x, d in stacked]
    return _wrap([*results[: loop.num_carry], *rows], differs)


def _while(eqn: Any, held: Held, differs: list[Differs], device: VirtualDevice) -> list[Same | Own]:
    loop = While.of(eqn.params)
    of_cond, of_body, start = loop.split(held)

    def condition(carried: list[Any]) -> Any:
        results = run_virtually(loop.condition, [*of_cond, *_wrap(carried, differs)], device)
        return device.get_one(results[0])

    def body(carried: list[Any]) -> list[Any]:
        results = run_virtually(loop.body, [*of_body, *_wrap(carried, differs)], device)
        return _unwrap(results, differs, device)

    # Values that differ have the shape [replica, rows of the loop, ...].
    fronts = [1 if d else 0 for d in differs]
    return _wrap(loop.run(condition, body, _unwrap(start, differs, device), fronts), differs)


def _cond(eqn: Any, held: Held, differs: list[Differs], device: VirtualDevice) -> list[Same | Own]:
    index, *operands = held
    branches = eqn.params["branches"]

    def make_branch(branch: Any) -> Callable[[list[Any]], list[Any]]:
        def run_branch(values: list[Any]) -> list[Any]:
            own = [isinstance(x, Own) for x in operands]
            return _unwrap(run_virtually(branch, _wrap(values, own), device), differs, device)

        return run_branch

    values = jax.lax.switch(
        device.get_one(index), [make_branch(b) for b in branches], [_get_array(x) for x in operands]
    )
    return _wrap(values, differs)


LOOPS = {"scan": _scan, "cond": _cond, "while": _while}
