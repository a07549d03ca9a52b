"""Optimizers of scheduled functions, on the servers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist import _compat
from jaxdist._parameter_server.closures.cut import cut_update
from jaxdist._parameter_server.closures.inputs import is_key
from jaxdist._parameter_server.closures.recorder import Recorder, Recorders, list_optimizers
from jaxdist._parameter_server.closures.trace import OPTIMIZER
from jaxdist._parameter_server.closures.traced import Traced
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist._parameter_server.worker_protocol import Update


def move_optimizers(
    traced: Traced, recorders: Recorders, nodes: Sequence[Any], strategy: Any
) -> Traced:
    """Move the optimizers that a closure updates with to the servers.

    Each variable's part of the state goes to the server of the variable, with the value that it has
    now; the optimizer on the coordinator then reads it from there.

    Args:
        traced: The closure; its updates by optimizers have the operation `optimizer:<n>:<leaf>`.
        recorders: What the trace has recorded of its optimizers.
        nodes: The NNX objects among the arguments.
        strategy: The strategy of the servers.

    Returns:
        The closure with operations that the servers have.
    """
    optimizers = list_optimizers(list(nodes))
    moved = list(traced.closure.updates)
    for number, recorder in enumerate(recorders.all):
        if not recorder.is_used:
            continue
        prefix = f"{OPTIMIZER}{number}:"
        own = [(n, u) for n, u in enumerate(moved) if u.op.startswith(prefix)]
        keys = _move_one(optimizers[number], recorder, [u for _, u in own], strategy)
        for (n, update), key in zip(own, keys, strict=True):
            moved[n] = msgspec.structs.replace(update, op=f"program:{key}")
    # The digest then says which optimizers these are.
    closure = msgspec.structs.replace(traced.closure, updates=tuple(moved))
    return dataclasses.replace(traced, closure=closure.with_digest())


def _move_one(
    optimizer: Any, recorder: Recorder, updates: Sequence[Update], strategy: Any
) -> list[str]:
    """Move one optimizer; return the key of the update program of each parameter."""
    servers: Servers = strategy.storage
    number = strategy.adopted.find_number(optimizer)
    # Also state that no update needs, such as an average of the parameters: without it, the
    # optimizer would keep the first one.
    params = recorder.treedef.unflatten(recorder.shapes)
    programs = cut_update(recorder.tx, params, keeps_unneeded=True)
    state = _list_state(optimizer)
    held = {name: _read(variable) for name, variable in state.items()}
    keys = []
    slots: dict[str, list[str]] = {}
    for update, program, shape in zip(updates, programs, recorder.shapes, strict=True):
        found = program.by_shape[shape.shape]
        first = [held[slot] for slot in program.slots]
        prefix = f"optimizer_{number}"
        request = found.make_request(f"{number}", update.name, len(first), first, prefix)
        names = servers.register(servers.find_server(update.name), request)
        for slot, name in zip(program.slots, names, strict=True):
            slots.setdefault(slot, []).append(name)
        keys.append(request.key)
    # The optimizer of the coordinator reads its state from the servers. A count of steps is a slot
    # of each variable.
    for slot, names in slots.items():
        raw = _get_raw(state[slot])
        is_here = isinstance(state[slot], nnx.Variable) and not isinstance(raw, ServerVariable)
        if is_here:
            there = ServerVariable.connect(strategy, names, raw.shape, raw.dtype)
            strategy.adopted.add(state[slot], there)
    return keys


def _list_state(optimizer: Any) -> dict[str, Any]:
    """Return the variables of the state of an optimizer, by their paths."""
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    flat, _ = tree_flatten_with_path(optimizer.opt_state, is_leaf=is_variable)
    return {keystr(path, simple=True, separator="."): x for path, x in flat}


def _get_raw(leaf: Any) -> Any:
    """Return the value of a leaf of the state of an optimizer."""
    return _compat.get_held(leaf) if isinstance(leaf, nnx.Variable) else leaf


def _read(leaf: Any) -> np.ndarray:
    """Return the value of a leaf of the state of an optimizer; of random keys, their data."""
    raw = _get_raw(leaf)
    return np.asarray(jax.random.key_data(raw) if is_key(raw) else raw)
