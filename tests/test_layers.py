"""A lower room never imports a higher one, not even inside a function or for types only."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

import jaxdist

ROOT = pathlib.Path(jaxdist.__file__).parent

# Top to bottom, as in `docs/design/000-rooms.md`. A room may use the rows before its own; rooms of
# one row do not use each other, except as SIDEWAYS says.
ROWS = [
    {"_typing", "errors"},
    {"_chips", "_compat", "_not_there", "_validate"},
    {"cluster_resolver", "tpu"},
    {"mesh", "runtime", "hlo"},
    {"cost"},
    {"explain"},
    {"values", "collectives"},
    {"replica"},
    {"program", "data", "nn", "update", "partition"},
    {"strategies", "parameter_server"},
    {"training", "estimator"},
    {"experimental", "coordinator", "compat", "contrib", "config"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
SIDEWAYS = {("collectives", "values"), ("cluster_resolver", "tpu")}
LEVEL = {room: level for level, rooms in enumerate(ROWS) for room in rooms}

# Rooms that could run without JAX: who is in the job, and where chips sit.
WITHOUT_JAX = {"cluster_resolver", "tpu"}

# Uses what it tests. `__init__` lists it, and the command is a user like any other; no room below
# them may lean on it.
OUTSIDE = "testing"
USERS_OF_TESTING = {"__init__"}


def _modules(source: str) -> Iterator[str]:
    """Dotted names of everything that `source` imports, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "jaxdist":
            yield from (f"jaxdist.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _room(dotted: str) -> str:
    """The room that `jaxdist.x.y` lies in; a public name counts as `__init__`."""
    part = (dotted.split(".") + ["__init__"])[1]
    return part if part in LEVEL or part == OUTSIDE else "__init__"


def import_faults(here: str, source: str) -> list[str]:
    """Sentences on what `source`, a module of the room `here`, may not import."""
    faults = []
    for module in _modules(source):
        package = module.split(".")[0]
        if package == "pickle":
            faults.append("imports pickle")
        if package == "jax" and here in WITHOUT_JAX:
            faults.append(f"{here} imports {module}, and is a room without jax")
        if module.startswith("jax._src") and here != "_compat":
            faults.append(f"imports {module}, which is private; put the need in _compat")
        there = _room(module)
        if package != "jaxdist" or there == here or here == OUTSIDE:
            continue
        if there == OUTSIDE:
            if here not in USERS_OF_TESTING:
                faults.append(f"{here} imports {module}, which no room may use")
        elif LEVEL[there] > LEVEL[here]:
            faults.append(f"{here} imports {module}, from a lower row of the table")
        elif LEVEL[there] == LEVEL[here] and (here, there) not in SIDEWAYS:
            faults.append(f"{here} imports {module}, of its own row")
    return faults


FILES = sorted(ROOT.rglob("*.py"))


def _room_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def _name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_point_up_the_table(path: pathlib.Path) -> None:
    assert _room_of(path) in LEVEL.keys() | {OUTSIDE}, "a room that the table does not know"
    assert import_faults(_room_of(path), path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_user_input_never_meets_an_assert(path: pathlib.Path) -> None:
    lines = [n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)]
    assert lines == [], "raise an error of jaxdist.errors that says what to do"


@pytest.mark.parametrize(
    ("here", "source", "fault"),
    [
        ("values", "from jaxdist.strategies import Strategy", "lower row"),
        ("values", "def f():\n    import jaxdist._program.trace.trace", "lower row"),
        ("mesh", "if TYPE_CHECKING:\n    from jaxdist.values import PerReplica", "lower row"),
        ("replica", "from jaxdist import strategies", "lower row"),
        ("strategies", "from jaxdist import MirroredStrategy", "lower row"),
        ("strategies", "import jaxdist", "lower row"),
        ("values", "from jaxdist.collectives import all_reduce", "own row"),
        ("program", "from jaxdist.data import split_batch", "own row"),
        ("program", "from jaxdist.testing import virtual_devices", "no room"),
        ("program", "from jax._src import core", "private"),
        ("program", "def f():\n    import jax._src.core as core", "private"),
        ("training", "import pickle", "pickle"),
        ("tpu", "import jax.numpy as jnp", "without jax"),
    ],
)
def test_planted_import_is_found(here: str, source: str, fault: str) -> None:
    [sentence] = import_faults(here, source)
    assert fault in sentence


@pytest.mark.parametrize(
    ("here", "source"),
    [
        ("collectives", "from jaxdist.values import PerReplica"),
        ("program", "from jaxdist._replica import ReplicaContext"),
        ("program", "from jaxdist._program.trace.trace import trace"),
        ("_compat", "from jax._src import core"),
        ("_compat", "from jaxdist._compat._tracing import inside_trace"),
        ("__init__", "from jaxdist import testing as testing"),
        ("__init__", "from jaxdist import experimental as experimental"),
        ("cli", "from jaxdist.training import train"),
        ("cli", "import jaxdist"),
    ],
)
def test_import_that_points_up_is_left_alone(here: str, source: str) -> None:
    assert import_faults(here, source) == []
