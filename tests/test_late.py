"""What is imported when: jaxdist without JAX, a name with what it needs, a room when it is read."""

import ast
import importlib
import inspect
import json
import os
import pathlib
import pydoc
import subprocess
import sys
import types
from typing import Any

import pytest

import jaxdist
from jaxdist import _first_import
from tests import test_layers as layers

FILES = layers._files()
LATE = {
    name: block for name, source in FILES.items() if (block := layers.late_block(ast.parse(source)))
}
COMMANDS = (
    "bench",
    "bench collectives",
    "chips",
    "examples",
    "info",
    "launch",
    "lint",
    "new",
    "plan",
    "resolve",
    "server",
    "trace",
    "train",
)
# So many modules `jaxdist.MirroredStrategy` may import after JAX, Flax and Optax.
MOST_MODULES = 350
# What it never imports: servers, Keras, the loops, jobs, plans, and what commands need.
LATER = (
    "_checkpoints",
    "_checks",
    "_explain",
    "_gpus",
    "_keras",
    "_keras_servers",
    "_launching",
    "_lint",
    "_parameter_server",
    "_planning",
    "_preemption",
    "_program.op_by_op.executor",
    "_program.report",
    "_program.virtual.program",
    "_reports",
    "_resolve",
    "_update",
    "cli",
    "cluster_resolver",
    "compat",
    "config",
    "contrib",
    "coordinator",
    "estimator",
    "experimental",
    "fit",
    "hlo",
    "jobs",
    "nn",
    "testing",
    "tpu",
    "training",
)


def _run(program: str, **more: str) -> str:
    """Return what a program prints in a process of its own."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", **more}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _names(block: list[ast.stmt]) -> dict[str, tuple[str, str]]:
    """The names of a block, with the module that each is imported from and its name there."""
    found: dict[str, tuple[str, str]] = {}
    for node in block:
        if isinstance(node, ast.ImportFrom):
            found |= {
                a.asname or a.name: (node.module or "", a.name) for a in node.names if a.name != "*"
            }
        else:
            assert isinstance(node, ast.Assign), ast.unparse(node)
            found[ast.unparse(node.targets[0])] = found[ast.unparse(node.value)]
    return found


def _dotted(file: str) -> str:
    return f"jaxdist.{file}".removesuffix(".__init__").removesuffix(".__init__")


@pytest.mark.parametrize("file", sorted(LATE))
def test_a_room_has_the_names_of_its_block_and_no_others(file: str) -> None:
    module = importlib.import_module("jaxdist" if file == "__init__" else _dotted(file))
    names = _names(LATE[file])
    assert set(names) <= set(dir(module))
    for name, (source, own) in names.items():
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            assert value.__name__ == f"{source}.{own}"
        else:
            assert value is getattr(importlib.import_module(source), own)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = module.no_such_name


@pytest.mark.parametrize("file", [f for f in sorted(LATE) if f.endswith("__init__")])
def test_no_name_of_a_room_is_that_of_a_file_in_it(file: str) -> None:
    folder = layers.ROOT.joinpath(*file.split(".")[:-1])
    entries = {path.stem for path in folder.iterdir()}
    # Python sets an attribute of the folder when it imports the file, in place of the name.
    here = "jaxdist" if file == "__init__" else _dotted(file)
    names = {name for name, (source, _) in _names(LATE[file]).items() if source != here}
    assert names & entries == set()


def test_import_of_jaxdist_loads_no_jax_and_shows_all_names() -> None:
    program = (
        "import inspect, json, sys\nimport jaxdist\n"
        "names = dir(jaxdist)\n"
        "from jaxdist import errors, fit, partition\n"
        "import jaxdist.cluster_resolver, jaxdist.jobs, jaxdist.training\n"
        "print(json.dumps([names, jaxdist.__all__, 'jax' in sys.modules]))"
    )
    names, listed, has_jax = json.loads(_run(program))
    assert not has_jax
    assert set(listed) <= set(names)
    assert {"MirroredStrategy", "Variable", "fit", "explain", "GradientReport"} <= set(listed)


def test_tools_that_look_at_a_module_see_all_names() -> None:
    space: dict[str, Any] = {}
    exec("from jaxdist import *", space)
    assert space.keys() - {"__builtins__"} <= set(dir(jaxdist))
    assert {"MirroredStrategy", "StrategyExtended", "fit"} <= space.keys()
    assert dict(inspect.getmembers(jaxdist))["MirroredStrategy"] is jaxdist.MirroredStrategy
    assert "class MirroredStrategy" in pydoc.plain(pydoc.render_doc(jaxdist))
    assert pydoc.locate("jaxdist.fit.Model") is jaxdist.fit.Model
    assert "TYPE_CHECKING" not in dir(jaxdist)


def test_help_of_commands_loads_no_jax() -> None:
    calls = ["--version", "--help", *(f"{command} --help" for command in COMMANDS)]
    program = (
        "import contextlib, io, sys\nfrom jaxdist.cli import main\n"
        f"for words in {calls!r}:\n"
        "    try:\n"
        "        with contextlib.redirect_stdout(io.StringIO()): main(words.split())\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0, words\n"
        "    assert 'jax' not in sys.modules, words"
    )
    _run(program)


def test_every_command_is_in_the_list_above(capsys: pytest.CaptureFixture[str]) -> None:
    from jaxdist.cli import main

    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out.partition("COMMAND")[2]
    found = {
        line.split()[0] for line in shown.splitlines() if line[:4].isspace() and line[4:5] > " "
    }
    assert {c for c in COMMANDS if " " not in c} == found


def test_first_strategy_loads_strategies_values_programs_and_data_only() -> None:
    program = (
        "import json, sys\nimport jax, flax.nnx, optax\nbefore = set(sys.modules)\n"
        "import jaxdist\njaxdist.MirroredStrategy\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    new: list[str] = json.loads(_run(program))
    # The `__init__` of a room imports nothing, so it does not count.
    files = {name.removeprefix("jaxdist.") for name in new} & FILES.keys()
    assert {f for f in files for room in LATER if f"{f}.".startswith(f"{room}.")} == set()
    others = {name.split(".")[0] for name in new} - {"jaxdist", "jax"}
    assert others & {"grpc", "msgspec", "numpy", "orbax", "rich", "urllib"} == set()
    assert len(new) <= MOST_MODULES, "import what a strategy does not need when it is read"


def test_no_function_is_traced_again_because_a_room_is_imported() -> None:
    program = (
        # With JAX 0.12 these make JAX trace again themselves.
        "import flax.nnx, orbax.checkpoint, jax.experimental.pallas.fuser\n"
        "import jaxdist, jax\ntraces = []\n"
        "f = jax.jit(lambda x: traces.append(1) or x + 1)\nf(1.0)\n"
        "for module in (jaxdist, jaxdist.fit, jaxdist.jobs, jaxdist.training, jaxdist.data):\n"
        "    for name in module.__all__: getattr(module, name)\n"
        "f(1.0)\nprint(len(traces))"
    )
    assert _run(program) == "1\n"


@pytest.mark.parametrize("order", ["import jax\nimport jaxdist", "import jaxdist\nimport jax"])
def test_jax_knows_of_jaxdist_before_the_program_can_trace(order: str) -> None:
    names = _first_import._WITH_JAX
    assert _run(f"{order}\nimport sys\nprint(set({names!r}) <= set(sys.modules))") == "True\n"


def test_a_program_that_only_looks_for_a_module_leaves_the_watch_in_place() -> None:
    program = (
        "import importlib.util, sys\nimport jaxdist\n"
        "assert importlib.util.find_spec('jax') is not None\n"
        "import jax\nprint('jaxdist._contexts' in sys.modules, type(jax.__spec__.loader).__name__)"
    )
    assert _run(program) == "True SourceFileLoader\n"


def test_only_listed_modules_import_rooms_by_name() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file, source in FILES.items()
        if file not in {"_first_import", "_hooks", "_late"}
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in {"import_module", "__import__", "Hook"}
        and node.args
        and "jaxdist" in ast.unparse(node.args[0])
    ]
    assert found == [], "imports that no test of layers sees"


_ALONE = pathlib.Path(__file__).with_name("alone.py")


def test_examples_of_public_names_run_where_nothing_else_is_imported() -> None:
    """A name behaves as it does with all rooms imported, whatever the program has used before."""
    done = subprocess.run([sys.executable, _ALONE], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
