"""Runs the example of each public name in a process that has imported no other name."""

import doctest
import inspect
import io
import os
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist

# As for all other examples.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def _list_callables() -> list[tuple[types.ModuleType, str]]:
    modules = [jaxdist, jaxdist.compat.v1, jaxdist.config, jaxdist.contrib, jaxdist.coordinator]
    modules += [jaxdist.experimental, jaxdist.nn, jaxdist.partition, jaxdist.testing]
    return [(m, n) for m in modules for n in dir(m) if not n.startswith("_")]


def _run_example(module: types.ModuleType, name: str) -> str:
    """Return what is wrong, or ""."""
    value: Any = getattr(module, name)
    if isinstance(value, types.ModuleType) or not callable(value):
        return ""
    text = inspect.getdoc(value) or ""
    source = "\n".join(e.source for e in doctest.DocTestParser().get_examples(text))
    used = set(compile(source, name, "exec").co_names) | _inner_names(source)
    # Only the names of the example: every other one would import its room.
    libraries = {"np": np, "jax": jax, "jnp": jnp, "optax": optax, "nnx": nnx, "jaxdist": jaxdist}
    public = set(dir(jaxdist)) - set(libraries)
    names = {n: getattr(jaxdist, n) for n in used & public if not n.startswith("_")}
    names |= {n: getattr(jaxdist, n) for n in ("fit", "partition", "training") if n in used}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    own = vars(sys.modules[value.__module__])
    space = {**own, **names, **libraries}
    test = doctest.DocTestParser().get_doctest(text, space, name, None, None)
    shown = io.StringIO()
    runner.run(test, out=shown.write)
    return shown.getvalue()


def _inner_names(source: str) -> set[str]:
    found: set[str] = set()
    todo = [compile(source, "example", "exec")]
    while todo:
        code = todo.pop()
        found |= set(code.co_names)
        todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return found


def main() -> int:
    """Return the number of names whose example fails."""
    failed = 0
    for module, name in _list_callables():
        # JAX is imported, and has started nothing, so the process can be copied.
        child = os.fork()
        if child == 0:
            wrong = "raised"
            try:
                wrong = _run_example(module, name)
            finally:
                if wrong:
                    print(f"{module.__name__}.{name}:\n{wrong}", flush=True)
                os._exit(bool(wrong))
        failed += os.waitpid(child, 0)[1] != 0
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
