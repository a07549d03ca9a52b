"""The virtual replicas of one device: their values, and operations without collectives."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import Sharding

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.control_flow import Scan, While, get_solve
from jaxdist._program.jaxprs.interpreter import Interpreter
from jaxdist._program.jaxprs.subprograms import iterate_with_inner
from jaxdist._program.proof.replication import get_named_axes
from jaxdist.errors import UnsupportedError


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Same:
    """A value that is equal on all replicas, stored once."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Own:
    """A value of its own for each replica; `rows` has those of this device, `[V/R, ...]`."""

    rows: Any


@dataclasses.dataclass(frozen=True)
class VirtualDevice:
    """The virtual replicas of one strategy, as one device sees them inside `shard_map`.

    V is the number of virtual replicas, R the number of devices; each device has V/R of them.
    """

    layout: ReplicaMesh

    @property
    def axes(self) -> frozenset[str]:
        """The replica axes in the form of the replication analysis."""
        return frozenset(self.layout.replica_axes)

    @property
    def count(self) -> int:
        """The number of virtual replicas on all devices, V."""
        return self.layout.num_replicas

    @property
    def num_local(self) -> int:
        """The number of virtual replicas on this device, V/R."""
        return self.layout.replicas_per_place

    def get_numbers(self) -> jax.Array:
        """Return the numbers of this device's replicas, `[V/R]`."""
        first = jax.lax.axis_index(self.layout.replica_axes) * self.num_local
        return first + jnp.arange(self.num_local, dtype=jnp.int32)

    def rows(self, held: Same | Own) -> Any:
        """Return a value for each of this device's replicas, `[V/R, ...]`."""
        if isinstance(held, Own):
            return held.rows
        value = held.value if hasattr(held.value, "shape") else jnp.asarray(held.value)
        return jnp.broadcast_to(value[None], (self.num_local, *value.shape))

    def get_one(self, held: Same | Own) -> Any:
        """Return a value that the analysis has proved to be equal on all replicas."""
        return held.value if isinstance(held, Same) else held.rows[0]

    def gather_rows(self, held: Same | Own) -> Any:
        """All-gather the values of all replicas to each device, `[V, ...]`."""
        if isinstance(held, Same):
            value = jnp.asarray(held.value)
            return jnp.broadcast_to(value[None], (self.count, *value.shape))
        rows = held.rows
        # Arrays without elements need no communication.
        if not rows.size:
            rows = jnp.broadcast_to(rows[:1], (self.count, *rows.shape[1:]))
        elif self.layout.num_places > 1:
            rows = jax.lax.all_gather(rows, self.layout.replica_axes, axis=0, tiled=True)
        return barrier(rows)


def barrier(values: Any) -> Any:
    """Return the same values behind an optimization barrier.

    XLA does not fuse across it. Fusion decides where products and sums are rounded, so the programs
    for different numbers of devices need barriers at the same places.
    """
    return jax.lax.optimization_barrier(values)


def get_literal(atom: Literal) -> Any:
    """Return the value of a literal, without the mesh under which it was traced."""
    value = atom.val
    return np.asarray(value) if hasattr(value, "dtype") else value


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

    not_entered = frozenset({"shard_map"})

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
        results = _compat.bind_like(eqn, inputs, params, in_current_mesh=True)
        # A barrier reads all results. GSPMD marks only those as local that something reads, and
        # ends the process at a custom call with results of both kinds.
        return barrier(results) if eqn.primitive.name in known.DECOMPOSITIONS else results

    def call(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            # Without the barrier XLA would merge the second computation (for the gradient) with
            # the first, and keep the values that checkpoint was to save memory for.
            inputs = list(jax.lax.optimization_barrier(inputs))
        return super().call(eqn, inputs)

    def scan(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        loop = Scan.of(eqn.params)
        held, start, over = loop.split(inputs)

        def body(given: list[Any]) -> list[Any]:
            return self.run(loop.program, [*held, *given])

        return loop.run(body, start, over, unroll=loop.unroll)

    def while_loop(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        loop = While.of(eqn.params)
        of_condition, of_body, start = loop.split(inputs)

        def condition(state: list[Any]) -> Any:
            return self.run(loop.condition, [*of_condition, *state])[0]

        def body(state: list[Any]) -> list[Any]:
            return self.run(loop.body, [*of_body, *state])

        return loop.run(condition, body, start)

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


@called("strategy.run")
def _needs_a_device(eqn: Any) -> str:
    name = eqn.primitive.name
    return (
        f"{name_call()} of a strategy with deterministic=True was given a step that has a "
        f"{name} that depends on the replica or on a mesh, at {_compat.find_source(eqn)}.\n\n"
        f"Several virtual replicas share one device, and a {name} sees the device.\n\n"
        "Read get_replica_context().replica_id_in_sync_group outside of it and pass the number "
        "in; leave jax.shard_map out of the step; or leave deterministic out."
    )
