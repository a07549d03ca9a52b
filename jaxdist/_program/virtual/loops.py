"""Loops and branches with collectives, for virtual replicas.

The loop stays a loop, and its body is cut at its collectives like the step itself. A part of the
carry is one value (`Same`) if the analysis proves that it is equal on all replicas in every
iteration. Otherwise it is one row for each replica (`Own`). Each function gets `differs`, the
analysis's facts about the results: the form of a carry must be known before JAX traces the body.
See Note [Virtual replicas].
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxdist._program.jaxprs.control_flow import Scan, While, run_while
from jaxdist._program.proof.replication import Differs
from jaxdist._program.virtual.device import Own, Same, VirtualDevice

Run: TypeAlias = Callable[[Any, Sequence[Same | Own], VirtualDevice], list[Same | Own]]
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


def _scan(
    eqn: Any, held: Held, differs: list[Differs], device: VirtualDevice, run: Run
) -> list[Same | Own]:
    loop = Scan.of(eqn.params)
    consts, start, over = loop.split(held)
    state, of_rows = differs[: loop.num_carry], differs[loop.num_carry :]
    own_rows = [isinstance(x, Own) for x in over]
    # [iteration, replica, ...], since a scan iterates over dim 0.
    given = [
        jnp.moveaxis(x.rows, 1, 0) if isinstance(x, Own) else jnp.asarray(x.value) for x in over
    ]

    def body(carried: list[Any], values: list[Any]) -> Any:
        inputs = [*consts, *_wrap(carried, state), *_wrap(values, own_rows)]
        results = _unwrap(run(loop.program, inputs, device), differs, device)
        return results[: loop.num_carry], results[loop.num_carry :]

    last, stacked = jax.lax.scan(
        body,
        _unwrap(start, state, device),
        given,
        length=loop.length,
        reverse=eqn.params["reverse"],
    )
    rows = [jnp.moveaxis(x, 0, 1) if d else x for x, d in zip(stacked, of_rows, strict=True)]
    return [*_wrap(last, state), *_wrap(rows, of_rows)]


def _while(
    eqn: Any, held: Held, differs: list[Differs], device: VirtualDevice, run: Run
) -> list[Same | Own]:
    loop = While.of(eqn.params)
    of_cond, of_body, start = loop.split(held)

    def condition(carried: list[Any]) -> Any:
        results = run(loop.condition, [*of_cond, *_wrap(carried, differs)], device)
        return device.get_one(results[0])

    def body(carried: list[Any]) -> list[Any]:
        results = run(loop.body, [*of_body, *_wrap(carried, differs)], device)
        return _unwrap(results, differs, device)

    values = _unwrap(start, differs, device)
    # Values that differ have the shape [replica, rows of the loop, ...].
    fronts = [1 if d else 0 for d in differs]
    last = run_while(condition, body, values, is_batched=loop.is_batched, axes=fronts)
    return _wrap(last, differs)


def _cond(
    eqn: Any, held: Held, differs: list[Differs], device: VirtualDevice, run: Run
) -> list[Same | Own]:
    index, *operands = held
    branches = eqn.params["branches"]

    def make_branch(branch: Any) -> Callable[[list[Any]], list[Any]]:
        def run_branch(values: list[Any]) -> list[Any]:
            own = [isinstance(x, Own) for x in operands]
            return _unwrap(run(branch, _wrap(values, own), device), differs, device)

        return run_branch

    values = jax.lax.switch(
        device.get_one(index), [make_branch(b) for b in branches], [_get_array(x) for x in operands]
    )
    return _wrap(values, differs)


LOOPS = {"scan": _scan, "cond": _cond, "while": _while}
