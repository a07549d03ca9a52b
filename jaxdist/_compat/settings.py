"""JAX's settings as a part of the keys of programs."""

import contextlib
from typing import Any

from jax._src import config as _config
from jax._src import mesh as _mesh

from jaxdist._compat.meshes import use_empty_mesh
from jaxdist._contexts import CHECKS_CONSTANTS, REWRITING, TRACE_NUMBER

# The meshes of `with mesh:`, which JAX also keeps apart from its settings. It may move as
# `meshes._ABSTRACT` does.
_OF_BLOCKS: Any = getattr(_mesh, "mesh_context_manager", None) or _config.mesh_context_manager


def read_settings() -> Any:
    """Return, as a key, the settings that decide what a function traces to.

    These are `jax_enable_x64`, `jax_threefry_partitionable`, `jax_default_matmul_precision` and so
    on, and the values of `jax.make_user_context`. Meshes and the default device are left out, since
    a strategy has its own mesh and devices. So are jaxdist's own values, which each trace sets.
    Waits for a public key.
    """
    meshes = _OF_BLOCKS.swap_local(())
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(use_empty_mesh())
            stack.enter_context(_config.default_device(None))
            for own in TRACE_NUMBER, CHECKS_CONSTANTS, REWRITING:
                stack.enter_context(own(own.get_global()))
            return _config.trace_context()
    finally:
        _OF_BLOCKS.set_local(meshes)
