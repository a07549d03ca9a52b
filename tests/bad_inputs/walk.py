"""Every public callable of jaxdist, found by walking the names that users can type."""

import enum
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import optax

import jaxdist
import jaxdist._program
import jaxdist._update
import jaxdist.compat.v1
import jaxdist.compat.v1.experimental
import jaxdist.cost
import jaxdist.data
import jaxdist.estimator
import jaxdist.fit
import jaxdist.jobs
import jaxdist.training
from jaxdist._values.variable.blocks import VariableSlice

MODULES = (
    jaxdist,
    jaxdist.cluster_resolver,
    jaxdist.config,
    jaxdist.coordinator,
    jaxdist.estimator,
    jaxdist.estimator.experimental,
    jaxdist.experimental,
    jaxdist.experimental.partitioners,
    jaxdist.experimental.rpc,
    jaxdist.nn,
    jaxdist.nn.schedules,
    jaxdist.partition,
    jaxdist.testing,
    jaxdist.tpu,
    jaxdist.tpu.experimental,
    jaxdist.contrib,
    jaxdist.compat.v1,
    jaxdist.compat.v1.experimental,
    jaxdist.cost,
    jaxdist.data,
    jaxdist.fit,
    jaxdist.jobs,
    jaxdist.training,
)
# Classes of which users hold objects, under a name that no public module lists.
RETURNED = {
    "jaxdist.Variable(...)[...]": VariableSlice,
    "jaxdist.function(...)": jaxdist._program.Function,
    "jaxdist.sharded_update(...)": jaxdist._update.ShardedUpdate,
}
# Functions that users hold likewise.
MADE = {
    f"jaxdist.{made.__name__}(...).{name}": getattr(made(optax.sgd(1.0)), name)
    for made in (jaxdist.sharded_update, jaxdist.compressed_update)
    for name in ("init", "update")
}
# Beside the methods whose names have no underscore.
SPECIAL = {"__call__", "__getitem__", "__setitem__"}


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in SPECIAL


def _modules() -> Iterator[ModuleType]:
    """The modules above, and those that they list."""
    seen: set[str] = set()
    left = list(MODULES)
    while left:
        module = left.pop(0)
        if module.__name__ in seen:
            continue
        seen.add(module.__name__)
        yield module


def _methods(name: str, owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for member, value in inspect.getmembers(owner, inspect.isroutine):
        module = getattr(value, "__module__", None) or ""
        if callable(value) and _is_public(member) and module.startswith("jaxdist"):
            yield f"{name}.{member}", value


def public_callables() -> dict[str, Callable[..., Any]]:
    """Functions, classes and their methods by the name that users type; each one only once."""
    named: list[tuple[str, Any]] = [
        (f"{module.__name__}.{name}", value)
        for module in _modules()
        for name in getattr(module, "__all__", vars(module))
        if not name.startswith("_")
        and callable(value := getattr(module, name))
        and not isinstance(value, ModuleType)
    ]
    named = [(n, v) for n, v in named if not isinstance(v, type) or not issubclass(v, enum.Enum)]
    found: dict[str, Callable[..., Any]] = {}
    seen: set[int] = set()

    def add(name: str, value: Any) -> bool:
        is_new = id(getattr(value, "__func__", value)) not in seen
        if is_new:
            seen.add(id(getattr(value, "__func__", value)))
            found[name] = value
        return is_new

    for name, value in named:
        add(name, value)
    classes = [(n, v) for n, v in named if isinstance(v, type)] + list(RETURNED.items())
    # The class that defines a method names it, not those that inherit it.
    for name, owner in sorted(classes, key=lambda row: len(inspect.getmro(row[1]))):
        for method, value in _methods(name, owner):
            add(method, value)
    return {**found, **MADE}


def parameters(value: Callable[..., Any]) -> list[str]:
    """Names of the parameters that a caller gives by name."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in inspect.signature(value).parameters.items()
        if name not in ("self", "cls") and parameter.kind not in variadic
    ]
