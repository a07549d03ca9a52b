"""The shardings that a program gives to functions of JAX, before JAX checks them."""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
from flax.core import spmd as _spmd
from jax._src import pjit as _pjit
from jax._src import sharding_impls as _sharding_impls

from jaxdist._compat.tracing import list_modules_of_jax
from jaxdist._contexts import REWRITING

_HERE = threading.local()
# Called by `reshard` and by all functions with `out_sharding=`.
_OUT_SHARDING = "canonicalize_sharding"
# Called by `with_sharding_constraint`, and by `jit` with `in_shardings=` or `out_shardings=`.
_CONSTRAINT = "_create_sharding_for_array"
# Called by a variable of Flax that is made with the names of axes.
_OF_VARIABLE = "_apply_sharding"

Rewrite = Callable[[Any, str], Any]


@contextlib.contextmanager
def rewrite_shardings(rewrite: Rewrite, key: Hashable = None) -> Iterator[None]:
    """Replace the shardings that functions of JAX get in the block, in this thread.

    Waits for JAX to accept a spec with axes that are manual around it.

    Args:
        rewrite: Takes a sharding and the name of the function of JAX that got it. Returns what JAX
            uses instead.
        key: Functions that JAX has traced with another key in place are traced again.
    """
    _install()
    before = getattr(_HERE, "rewrite", None)
    _HERE.rewrite = rewrite
    try:
        with REWRITING(key):
            yield
    finally:
        _HERE.rewrite = before


def _rewrite(sharding: Any, name: str) -> Any:
    rewrite: Rewrite | None = getattr(_HERE, "rewrite", None)
    return sharding if rewrite is None else rewrite(sharding, name)


def _install() -> None:
    # The patched functions are global and other threads may trace at the same time, so the switch
    # is a thread-local value.
    out_sharding: Any = getattr(_sharding_impls, _OUT_SHARDING)
    if getattr(out_sharding, "of_jaxdist", False):
        return
    constraint: Any = getattr(_pjit, _CONSTRAINT)
    of_variable: Any = getattr(_spmd, _OF_VARIABLE)

    def canonicalize(sharding: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return out_sharding(_rewrite(sharding, name), name, *args, **kwargs)

    def create(mesh: Any, sharding: Any, argument: str, name: str) -> Any:
        return constraint(mesh, _rewrite(sharding, name), argument, name)

    def lay_out_variable(value: Any, sharding: Any, mesh: Any) -> Any:
        # Flax refuses a mesh with axes that are manual.
        if getattr(_HERE, "rewrite", None) is None or not mesh.manual_axes:
            return of_variable(value, sharding, mesh)
        lay_out = jax.sharding.reshard if mesh.explicit_axes else jax.lax.with_sharding_constraint
        return lay_out(value, sharding)

    setattr(_spmd, _OF_VARIABLE, lay_out_variable)
    canonicalize.of_jaxdist = True  # type: ignore[attr-defined]
    setattr(_pjit, _CONSTRAINT, create)
    # Modules of JAX import the function by its name.
    for module in list_modules_of_jax():
        if getattr(module, _OUT_SHARDING, None) is out_sharding:
            setattr(module, _OUT_SHARDING, canonicalize)
