"""One virtual replica's turn: operations without collectives, on its own values."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import Sharding

from jaxdist import _compat
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.batched_while import any_goes_on, where_it_goes_on
from jaxdist._program.jaxprs.subprograms import subprograms
from jaxdist._program.proof.replication import named_axes
from jaxdist._program.virtual.values import VirtualDevice, literal
from jaxdist.errors import UnsupportedError

# What they do is about layouts, and a virtual replica has whole arrays on one device. Each names
# the mesh that the step was traced over, which has more devices than there are.
_LAYOUT_ONLY = frozenset({"sharding_constraint", "pcast", "pvary", "reshard", "mesh_cast"})


def asks_number(eqn: Any, turns: VirtualDevice) -> bool:
    """Whether an operation, or one inside it, reads the number of the replica."""
    return _asks_number(eqn, turns) or any(
        asks_number(inner, turns)
        for program in subprograms(eqn)
        for inner in getattr(program, "jaxpr", program).eqns
    )


def _asks_number(eqn: Any, turns: VirtualDevice) -> bool:
    return eqn.primitive.name == "axis_index" and bool(
        frozenset(named_axes(eqn.params)) & turns.axes
    )


def do(eqn: Any, operands: Sequence[Any], number: Any, turns: VirtualDevice) -> list[Any]:
    """The results of one operation for the replica of this number.

    Programs inside it are written out, since they name the mesh that they were traced over.

    Raises:
        UnsupportedError: It holds something that a virtual replica cannot do.
    """
    name = eqn.primitive.name
    if name in _LAYOUT_ONLY:
        return list(operands)
    if _asks_number(eqn, turns):
        return [number]
    if name in known.CALLS and name != "shard_map":
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            # Or what is computed again for the gradient would be computed once and kept.
            operands = jax.lax.optimization_barrier(list(operands))
        return _run(eqn.params[known.CALLS[name]], operands, number, turns)
    if name in _LOOPS:
        return _LOOPS[name](eqn, operands, number, turns)
    if name == "custom_linear_solve":
        return _linear_solve(eqn, operands, number, turns)
    if name == "shard_map" or asks_number(eqn, turns):
        raise UnsupportedError(
            "strategy.run of a strategy with deterministic=True was given a step that has a "
            f"{name} that depends on the replica or on a mesh, at {_compat.source_of(eqn)}.\n\n"
            f"Several virtual replicas share one device, and a {name} sees the device.\n\n"
            "Read get_replica_context().replica_id_in_sync_group outside of it and pass the number "
            "in; leave jax.shard_map out of the step; or leave deterministic out."
        )
    # Layouts of results name the mesh that was traced over; inside a replica they say nothing.
    params = {k: None if isinstance(v, Sharding) else v for k, v in eqn.params.items()}
    results = _compat.bind_here(eqn, operands, params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _run(program: Any, operands: Sequence[Any], number: Any, turns: VirtualDevice) -> list[Any]:
    jaxpr = getattr(program, "jaxpr", program)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    env.update(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        results = do(eqn, [read(v) for v in eqn.invars], number, turns)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _scan(eqn: Any, operands: Sequence[Any], number: Any, turns: VirtualDevice) -> list[Any]:
    params = eqn.params
    consts, carry = _compat.scan_counts(params)
    held, start, rows = (
        operands[:consts],
        operands[consts : consts + carry],
        operands[consts + carry :],
    )

    def body(state: list[Any], values: list[Any]) -> Any:
        results = _run(params["jaxpr"], [*held, *state, *values], number, turns)
        return results[:carry], results[carry:]

    state, stacked = jax.lax.scan(
        body,
        list(start),
        list(rows),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*state, *stacked]


def _while(eqn: Any, operands: Sequence[Any], number: Any, turns: VirtualDevice) -> list[Any]:
    params = eqn.params
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_cond, of_body, start = (
        operands[: split[0]],
        operands[split[0] : split[1]],
        operands[split[1] :],
    )

    def condition(state: list[Any]) -> Any:
        return _run(params["cond_jaxpr"], [*of_cond, *state], number, turns)[0]

    is_batched = bool(params["cond_jaxpr"].out_avals[0].shape)

    def body(state: list[Any]) -> list[Any]:
        after = _run(params["body_jaxpr"], [*of_body, *state], number, turns)
        return where_it_goes_on(condition(state), after, state) if is_batched else after

    results: list[Any] = jax.lax.while_loop(
        lambda state: any_goes_on(condition(state)), body, list(start)
    )
    return results


def _linear_solve(
    eqn: Any, operands: Sequence[Any], number: Any, turns: VirtualDevice
) -> list[Any]:
    """Of the functions that it holds, only `solve` is run."""
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    rows = operands[sum(lengths) :]
    held = operands[start : start + lengths.solve]
    return _run(eqn.params["jaxprs"].solve, [*held, *rows], number, turns)


def _cond(eqn: Any, operands: Sequence[Any], number: Any, turns: VirtualDevice) -> list[Any]:
    index, *values = operands
    platforms = eqn.params.get("branches_platforms")
    if platforms is not None:
        here = turns.layout.platform
        fits = [p is None or here in p for p in platforms]
        return _run(eqn.params["branches"][fits.index(True)], values, number, turns)
    branches = [lambda *x, b=branch: _run(b, x, number, turns) for branch in eqn.params["branches"]]
    results: list[Any] = jax.lax.switch(index, branches, *values)
    return results


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
