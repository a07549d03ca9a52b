"""A process that has imported the package and what it uses, and runs pytest in copies of itself.

To import them takes seconds, which most mutants need not spend: only a change that is executed by
imports has to be on before.

Run as a file. Each line of its input is a request, and its answers are the pid of the process that
runs pytest, and the exit status. It ends with its input.
"""

import importlib
import importlib.util
import json
import os
import pathlib
import sys
from types import ModuleType
from typing import Any

import pytest

# Those that are installed, and the plugins of pytest that import much.
_LIBRARIES = ("jax", "flax.nnx", "optax", "orbax.checkpoint", "hypothesis", "xdist")

# `weaving.RUNTIME`; in the copy, which this file is not part of.
_RUNTIME = "jaxdist_mutants"


def _load(name: str) -> ModuleType:
    file = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_mutants_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_pytest(request: dict[str, Any]) -> int:
    os.environ.clear()
    os.environ.update(request["environment"])
    # The module has read it before.
    on = int(os.environ.get("JAXDIST_MUTANT", "-1"))
    vars(importlib.import_module(_RUNTIME))["_ON"] = on
    sys.argv = ["pytest", *request["arguments"]]
    sys.path.insert(0, os.getcwd())
    code = int(pytest.main(request["arguments"]))
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _run_contained(request: dict[str, Any]) -> int:
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for new, old in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(new, old)
    sys.stdin = os.fdopen(0)
    os.setsid()
    contain = _load("inside").contain
    code: int = contain(request["writable"], request["needed"], lambda: _run_pytest(request))
    return code & 255


def _serve(package: str) -> None:
    _load("inside").end_with_parent()
    for name in (*_LIBRARIES, package):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            os._exit(_run_contained(request))
        answers.write(f"{pid}\n")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answers.write(f"{status}\n")


if __name__ == "__main__":
    _serve(sys.argv[1])
