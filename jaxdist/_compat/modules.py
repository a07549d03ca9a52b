"""The modules of JAX, some of which import a function of another one by its name."""

import sys
from types import ModuleType


def list_modules_of_jax() -> list[ModuleType]:
    """Return all modules of JAX that are imported."""
    # A copy, which nothing can interrupt: another thread may import a module meanwhile.
    return [module for name, module in sys.modules.copy().items() if name.startswith("jax.")]
