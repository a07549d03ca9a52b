"""Versions and names of tasks, which the help of the command prints without loading JAX."""

import importlib.metadata
import pkgutil
import platform
from pathlib import Path

_PACKAGES = ("jaxdist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_FOLDERS = pkgutil.iter_modules([str(Path(__file__).parent)])
# See Note [How tasks are found].
TASK_NAMES = tuple(sorted(m.name for m in _FOLDERS if m.ispkg and not m.name.startswith("_")))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a result.

    The version of a missing package is `"not installed"`.
    """
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from source" if name == "jaxdist" else "not installed"
    return found
