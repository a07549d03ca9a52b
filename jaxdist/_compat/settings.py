"""JAX's settings, as a part of the keys of programs and for threads that work for another one."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import mesh as _mesh

from jaxdist._compat.meshes import use_empty_mesh
from jaxdist._contexts import CHECKS_CONSTANTS, REWRITING, TRACE_NUMBER

# The meshes of `with mesh:`, which JAX also keeps apart from its settings. It may move as
# `meshes._ABSTRACT` does.
_OF_BLOCKS: Any = getattr(_mesh, "mesh_context_manager", None) or _config.mesh_context_manager


def read_context() -> Any:
    """Return, as a key, all of JAX's settings: those of `read_settings`, meshes and devices.

    It is for calls that take microseconds, and that may be traced again under another mesh.
    """
    return _config.trace_context()


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


class ThreadSettings:
    """JAX's context settings of the thread that makes this object, for other threads.

    JAX stores `jax.enable_x64`, `jax.debug_nans`, `jax.default_matmul_precision` and so on per
    thread. A setting without a value of its own there is not copied, so that the other thread
    follows later changes of the global value. Waits for a public copy of them.

    Cost:
        1 us.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        unset = _config.config_ext.unset
        self._held = [(s, x) for s in _list_settings() if (x := s.get_local()) is not unset]

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Use the settings in the block, in any thread."""
        before = [(setting, setting.swap_local(value)) for setting, value in self._held]
        try:
            _tell(self._held)
            yield
        finally:
            for setting, value in before:
                setting.set_local(value)
            _tell(before)


@functools.cache
def _list_settings() -> tuple[Any, ...]:
    """Return the settings that `jax` has context managers for, and those of sub-programs."""
    found = [s for s in _config.config._value_holders.values() if isinstance(s, _config.State)]
    others = ("disable_jit", "check_vma")
    # `thread_guard` is about the thread itself.
    return tuple(
        s
        for s in found
        if s.__name__ in others
        or (getattr(jax, s.__name__, None) is s and s.__name__ != "thread_guard")
    )


def _tell(settings: Sequence[tuple[Any, Any]]) -> None:
    """Tell the part of JAX in C++, which has its own copy of some settings."""
    for setting, value in settings:
        hook = setting._update_thread_local_hook
        if hook is not None:
            hook(None if value is _config.config_ext.unset else value)
