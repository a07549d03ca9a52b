"""Evaluation of operations without collectives, on the values of one virtual replica."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from jaxdist import _compat
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.batched_while import run_while
from jaxdist._program.jaxprs.control_flow import Scan, While, get_solve
from jaxdist._program.jaxprs.interpreter import Interpreter
from jaxdist._program.jaxprs.subprograms import iterate_with_inner
from jaxdist._program.proof.replication import get_named_axes
from jaxdist._program.virtual.values import VirtualDevice, get_literal
from jaxdist.errors import UnsupportedError


def is_over_replicas(eqn: Any, device: VirtualDevice) -> bool:
    """Whether an operation is over a replica axis, and not only over axes of size 1."""
    return bool(frozenset(get_named_axes(eqn.params)) & device.axes)


def has_replica_number(eqn: Any, device: VirtualDevice) -> bool:
    """Whether an operation, or one inside it, reads the number of the replica."""
    return any(_is_replica_number(e, device) for e in iterate_with_inner(eqn))


def _is_replica_number(eqn: Any, device: VirtualDevice) -> bool:
    return eqn.primitive.name == "axis_index" and is_over_replicas(eqn, device)


def evaluate_operation(
    eqn: Any, operands: Sequence[Any], number: Any, device: VirtualDevice
) -> list[Any]:
    """Evaluate one operation for the replica of this number.

    The programs inside it are traced again, since their parameters name the mesh of the trace.

    Raises:
        UnsupportedError: The operation needs a device or a mesh of its own.
    """
    return OneReplica(number, device).equation(eqn, list(operands))


class OneReplica(Interpreter[Any]):
    """An interpreter that computes the values of one virtual replica.

    Args:
        number: The number of the replica, traced.
        device: The device of the replica.
    """

    def __init__(self, number: Any, device: VirtualDevice) -> None:
        self._number = number
        self._device = device

    def literal(self, literal: Any) -> Any:
        return get_literal(literal)

    def constant(self, variable: Any, value: Any) -> Any:
        return value

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        # A virtual replica has whole arrays on one device. The parameters of these operations name
        # the mesh of the trace, which has more devices than the machine.
        if eqn.primitive.name in known.LAYOUT_ONLY:
            return inputs
        if _is_replica_number(eqn, self._device):
            return [self._number]
        if eqn.primitive.name == "shard_map" or has_replica_number(eqn, self._device):
            raise UnsupportedError(_needs_a_device(eqn))
        # Shardings of results name the mesh of the trace, which does not exist here.
        params = {k: None if isinstance(v, Sharding) else v for k, v in eqn.params.items()}
        return _compat.bind_like(eqn, inputs, params, in_current_mesh=True)

    def call(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        if eqn.primitive.name == "shard_map":
            return self.operation(eqn, inputs)
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            # Without the barrier XLA would merge the second computation (for the gradient) with
            # the first, and keep the values that checkpoint was to save memory for.
            inputs = list(jax.lax.optimization_barrier(inputs))
        return super().call(eqn, inputs)

    def scan(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        loop, params = Scan.of(eqn.params), eqn.params
        held, start, rows = loop.split(inputs)

        def body(state: list[Any], values: list[Any]) -> Any:
            results = self.run(loop.program, [*held, *state, *values])
            return results[: loop.num_carry], results[loop.num_carry :]

        state, stacked = jax.lax.scan(
            body,
            start,
            rows,
            length=loop.length,
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*state, *stacked]

    def while_loop(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        loop = While.of(eqn.params)
        of_condition, of_body, start = loop.split(inputs)

        def condition(state: list[Any]) -> Any:
            return self.run(loop.condition, [*of_condition, *state])[0]

        def body(state: list[Any]) -> list[Any]:
            return self.run(loop.body, [*of_body, *state])

        return run_while(condition, body, start, is_batched=loop.is_batched)

    def cond(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        index, *values = inputs
        platforms = eqn.params.get("branches_platforms")
        # `jax.lax.platform_dependent` is a cond whose index only lowering knows.
        if platforms is not None:
            here = self._device.layout.platform
            fits = [p is None or here in p for p in platforms]
            return self.run(eqn.params["branches"][fits.index(True)], values)
        branches = [lambda *x, b=branch: self.run(b, x) for branch in eqn.params["branches"]]
        return jax.lax.switch(index, branches, *values)

    def linear_solve(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        return self.run(*get_solve(eqn, inputs))


def _needs_a_device(eqn: Any) -> str:
    name = eqn.primitive.name
    return (
        "strategy.run of a strategy with deterministic=True was given a step that has a "
        f"{name} that depends on the replica or on a mesh, at {_compat.find_source(eqn)}.\n\n"
        f"Several virtual replicas share one device, and a {name} sees the device.\n\n"
        "Read get_replica_context().replica_id_in_sync_group outside of it and pass the number "
        "in; leave jax.shard_map out of the step; or leave deterministic out."
    )
