"""Loops and branches with collectives, for virtual replicas.

The loop stays a loop, and its body is cut at its collectives like the step itself. A part of the
carry is one value (`Same`) if the analysis proves that it is equal on all replicas in every
iteration. Otherwise it is one row for each replica (`Own`). Each function is given what the
analysis says of the results (`differs`): the form of a carry must be known before JAX traces the
body. See Note [Virtual replicas].
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxdist._program.jaxprs.batched_while import has_active_row, keep_finished_rows
from jaxdist._program.jaxprs.control_flow import Scan, While
from jaxdist._program.proof.replication import Differs
from jaxdist._program.virtual.values import Own, Same, VirtualDevice

Run: TypeAlias = Callable[[Any, Sequence[Same | Own], VirtualDevice], list[Same | Own]]
Held: TypeAlias = Sequence[Same | Own]


def _get_array(held: Same | Own) -> Any:
    return held.rows if isinstance(held, Own) else jnp.asarray(held.value)


def _unwrap(held: Same | Own, differs: Any, device: VirtualDevice) -> Any:
    """Return the array of a value: a row for each replica if it differs, else one value."""
    return device.rows(held) if differs else jnp.asarray(device.get_one(held))


def _wrap(value: Any, differs: Any) -> Same | Own:
    return Own(value) if differs else Same(value)


def _wrap_all(values: Sequence[Any], differs: Sequence[Any]) -> list[Same | Own]:
    return [_wrap(v, d) for v, d in zip(values, differs, strict=True)]


def _unwrap_all(held: Held, differs: Sequence[Any], device: VirtualDevice) -> list[Any]:
    return [_unwrap(x, d, device) for x, d in zip(held, differs, strict=True)]


def _scan(
    eqn: Any, held: Held, differs: list[Differs], device: VirtualDevice, run: Run
) -> list[Same | Own]:
    params, loop = eqn.params, Scan.of(eqn.params)
    program, consts, carry = loop.program, loop.num_consts, loop.num_carry
    end = consts + carry
    state, of_rows = differs[:carry], differs[carry:]
    # [iteration, replica, ...], since a scan iterates over dim 0.
    given = [
        jnp.moveaxis(x.rows, 1, 0) if isinstance(x, Own) else jnp.asarray(x.value)
        for x in held[end:]
    ]

    def body(carried: list[Any], values: list[Any]) -> Any:
        own_rows = [isinstance(x, Own) for x in held[end:]]
        inputs = [*held[:consts], *_wrap_all(carried, state), *_wrap_all(values, own_rows)]
        results = run(program, inputs, device)
        return _unwrap_all(results[:carry], state, device), _unwrap_all(
            results[carry:], of_rows, device
        )

    start = _unwrap_all(held[consts:end], state, device)
    last, stacked = jax.lax.scan(
        body, start, given, length=params["length"], reverse=params["reverse"]
    )
    rows = [jnp.moveaxis(x, 0, 1) if d else x for x, d in zip(stacked, of_rows, strict=True)]
    return [*_wrap_all(last, state), *_wrap_all(rows, of_rows)]


def _while(
    eqn: Any, held: Held, differs: list[Differs], device: VirtualDevice, run: Run
) -> list[Same | Own]:
    params = eqn.params
    loop = While.of(eqn.params)
    of_cond, of_body, start = loop.split(held)

    def condition(carried: list[Any]) -> Any:
        results = run(params["cond_jaxpr"], [*of_cond, *_wrap_all(carried, differs)], device)
        return device.get_one(results[0])

    is_batched = bool(params["cond_jaxpr"].out_avals[0].shape)

    def body(carried: list[Any]) -> list[Any]:
        results = run(params["body_jaxpr"], [*of_body, *_wrap_all(carried, differs)], device)
        after = _unwrap_all(results, differs, device)
        if not is_batched:
            return after
        # Values that differ have the shape [replica, rows of the loop, ...].
        fronts = [1 if d else 0 for d in differs]
        return keep_finished_rows(condition(carried), after, carried, fronts)

    last = jax.lax.while_loop(
        lambda carried: has_active_row(condition(carried)),
        body,
        _unwrap_all(start, differs, device),
    )
    return _wrap_all(last, differs)


def _cond(
    eqn: Any, held: Held, differs: list[Differs], device: VirtualDevice, run: Run
) -> list[Same | Own]:
    index, *operands = held
    branches = eqn.params["branches"]

    def make_branch(branch: Any) -> Callable[[list[Any]], list[Any]]:
        def run_branch(values: list[Any]) -> list[Any]:
            own = [isinstance(x, Own) for x in operands]
            return _unwrap_all(run(branch, _wrap_all(values, own), device), differs, device)

        return run_branch

    values = jax.lax.switch(
        device.get_one(index), [make_branch(b) for b in branches], [_get_array(x) for x in operands]
    )
    return _wrap_all(values, differs)


LOOPS = {"scan": _scan, "cond": _cond, "while": _while}
