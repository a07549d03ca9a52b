"""Imports run downward: between rooms, and between the sub-rooms and files of a room."""

import ast
import collections
import functools
import pathlib
from collections.abc import Iterator, Mapping

import pytest

import jaxdist

ROOT = pathlib.Path(jaxdist.__file__).parent

# Bottom to top, as in `docs/design/000-rooms.md`. A room may use the rows before its own; rooms of
# one row do not use each other, except as SIDEWAYS says.
ROWS = [
    {"_contexts", "_first_import", "_late", "_typing", "errors"},
    {"_called"},
    {"_integers"},
    {"_compat", "_hooks", "_not_there", "_validate"},
    {
        "_buckets",
        "_compilation_cache",
        "_devices",
        "_examples",
        "_gpu_settings",
        "_lint",
        "_mesh",
        "_metadata_server",
        "_processes",
        "_projects",
        "hlo",
    },
    {"tpu", "cluster_resolver", "cost", "_launching"},
    {"_cluster", "_gpus", "_reports", "_resolve"},
    {"_values", "_collectives"},
    {"_pipeline", "_replica"},
    {"_program", "data", "nn", "partition"},
    {"_update"},
    {"_checks", "_checkpoints"},
    {"_strategies", "_preemption", "_weights"},
    {"_keras", "_planning", "training"},
    {"_parameter_server"},
    {"_explain", "_keras_servers"},
    {"estimator", "fit", "jobs"},
    {"experimental", "compat", "contrib", "config", "coordinator"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
SIDEWAYS = {
    ("_mesh", "_processes"),
    ("_collectives", "_values"),
    ("cluster_resolver", "tpu"),
    ("_resolve", "_cluster"),
}
# Likewise inside `_program`, the largest room.
PROGRAM = [
    {"jaxprs", "arguments"},
    {"nnx", "proof"},
    {"trace"},
    {"state", "variables", "uneven", "logical"},
    {"op_by_op", "report"},
    {"virtual", "functions"},
    {"compile"},
    {"run"},
    {"__init__"},
]
PROGRAM_SIDEWAYS = {("uneven", "state"), ("variables", "uneven")}

# And inside `_parameter_server`; see `docs/design/017-parameter-servers.md`.
SERVERS = [
    {"transport"},
    {"protocol", "worker_protocol"},
    {"server"},
    {"variables"},
    {"closures"},
    {"worker"},
    {"coordinator", "rpc"},
    {"strategy", "tasks"},
    {"__init__"},
]
INSIDE = {"_program": (PROGRAM, PROGRAM_SIDEWAYS), "_parameter_server": (SERVERS, set())}

# Rooms that could run without JAX: who is in the job, where chips are, what programs do.
WITHOUT_JAX = {"_lint", "_projects", "cluster_resolver", "tpu"}

# Names of JAX on the processes of a job, and the only room that uses them. A mesh knows the owners
# of its devices, so that what each process computes is tested in one.
PROCESSES = "_processes"
OF_PROCESSES = {"distributed", "process_count", "process_index", "process_indices"}

# Loading a pickle runs code. This one reads files of a private folder, which it has written.
MAY_PICKLE = {"testing._call"}

# Uses what it tests. `__init__` lists it; no other room uses it.
OUTSIDE = "testing"
USERS_OF_TESTING = {"__init__"}

# What users import. Every other entry of the package starts with an underscore.
PUBLIC = {
    "cli",
    "cluster_resolver",
    "compat",
    "config",
    "contrib",
    "coordinator",
    "cost",
    "data",
    "errors",
    "estimator",
    "experimental",
    "fit",
    "hlo",
    "jobs",
    "nn",
    "partition",
    "testing",
    "tpu",
    "training",
}
# Modules and folders inside of public rooms that users import too.
PUBLIC_INSIDE = {
    "compat.v1",
    "compat.v1.experimental",
    "compat.v1.tpu",
    "estimator.experimental",
    "experimental.coordinator",
    "experimental.partitioners",
    "experimental.rpc",
    "nn.schedules",
    "tpu.experimental",
}
# Every folder of this room without an underscore is a task, which users may import.
TASKS_OF = "jobs"

Files = Mapping[str, str]  # dotted name of a module inside of the package -> its source


def _files() -> dict[str, str]:
    """All modules; a folder is known by the name of its `__init__`, such as `data.__init__`."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
        for path in sorted(ROOT.rglob("*.py"))
    }


@functools.cache
def _imports(source: str) -> list[tuple[str, bool]]:
    """Dotted names of everything that `source` imports, and whether inside of a function.

    What a room imports when it is read counts as its other imports: late or not, imports run
    downward.
    """
    return list(_read_imports(source))


def late_block(tree: ast.Module) -> list[ast.stmt]:
    """The block of names that `_late` imports when they are read; [] if a module has none."""
    if not any(ast.unparse(node) == "_open_late(__name__)" for node in tree.body):
        return []
    blocks = [n for n in tree.body if isinstance(n, ast.If)]
    return [s for b in blocks if ast.unparse(b.test) == "TYPE_CHECKING" for s in b.body]


def _read_imports(source: str) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(source)
    top = {id(node) for node in (*tree.body, *late_block(tree))}
    for node in ast.walk(tree):
        inner = id(node) not in top
        if isinstance(node, ast.Import):
            yield from ((alias.name, inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", inner) for alias in node.names)


@functools.cache
def _uses_of_jax(source: str) -> set[str]:
    """The names `x` of `jax.x` that a module reads or imports."""
    read = {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "jax"
    }
    parts = [dotted.split(".") for dotted, _ in _imports(source)]
    return read | {names[1] for names in parts if names[0] == "jax" and len(names) > 1}


def _module(dotted: str, files: Files) -> str:
    """The module of the package that `jaxdist.x.y.name` is, or is in."""
    parts = dotted.split(".")[1:]
    while parts:
        for name in (".".join(parts), ".".join([*parts, "__init__"])):
            if name in files:
                return name
        parts.pop()
    return "__init__"


def _face(module: str, files: Files) -> set[str]:
    """The modules that the `__init__` of a room hands on as names."""
    source = files.get(f"{module}.__init__", "")
    return {
        dotted.removeprefix("jaxdist.")
        for dotted, _ in _imports(source)
        if dotted.startswith(f"jaxdist.{module}.")
    }


def _row_faults(
    here: str, there: str, rows: list[set[str]], sideways: set[tuple[str, str]]
) -> Iterator[str]:
    level = {room: number for number, rooms in enumerate(rows) for room in rooms}
    if level[there] > level[here]:
        yield f"imports {there}, from a higher row of the table"
    elif level[there] == level[here] and (here, there) not in sideways:
        yield f"imports {there}, of its own row"


def _import_faults(name: str, files: Files) -> Iterator[str]:
    """Sentences on what one module may not import."""
    room = name.split(".")[0]
    for dotted, inner in _imports(files[name]):
        package = dotted.split(".")[0]
        if package == "pickle" and name not in MAY_PICKLE:
            yield "imports pickle"
        if package == "jax" and room in WITHOUT_JAX:
            yield f"imports {dotted}, and is a room without jax"
        if dotted.startswith("jax._src") and room != "_compat":
            yield f"imports {dotted}, which is private; put the need in _compat"
        if package != "jaxdist":
            continue
        if inner:
            yield f"imports {dotted} inside of a function or a block"
        if _is_of_task(name):
            yield from _task_faults(name, dotted)
            continue
        module = _module(dotted, files)
        there = module.split(".")[0]
        if there == room or room == OUTSIDE:
            if room in INSIDE and there == room:
                parts = name.split(".")[1], module.split(".")[1]
                if parts[0] != parts[1]:
                    yield from _row_faults(*parts, *INSIDE[room])
            continue
        if there == OUTSIDE:
            if room not in USERS_OF_TESTING:
                yield f"imports {dotted}, which no room may use"
            continue
        yield from _row_faults(room, there, ROWS, SIDEWAYS)
        yield from _private_faults(module, there, files)


def _is_of_task(name: str) -> bool:
    room, *inside = name.split(".")
    return room == TASKS_OF and len(inside) > 1 and not inside[0].startswith("_")


def _task_faults(name: str, dotted: str) -> Iterator[str]:
    """A task is an example that users copy: it imports what they can import, and its own files."""
    own = "jaxdist.{}.{}.".format(*name.split("."))
    if not dotted.startswith(own) and any(part.startswith("_") for part in dotted.split(".")):
        yield f"imports {dotted}, and tasks import public names only"


def _process_faults(name: str, source: str) -> Iterator[str]:
    """One room asks JAX for the processes; the others ask that room, or a mesh for its owners."""
    if name.split(".")[0] != PROCESSES:
        for used in sorted(_uses_of_jax(source) & OF_PROCESSES):
            yield f"uses jax.{used}; ask {PROCESSES} for the process, or the mesh for its owners"


def _public_inside(files: Files) -> set[str]:
    """`PUBLIC_INSIDE`, and the tasks."""
    parts = [name.split(".") for name in files]
    tasks = [p[1] for p in parts if p[0] == TASKS_OF and len(p) > 2 and not p[1].startswith("_")]
    return PUBLIC_INSIDE | {f"{TASKS_OF}.{task}" for task in tasks}


def _private_faults(module: str, there: str, files: Files) -> Iterator[str]:
    """What another room imports is in the face of this one."""
    inside = module.removesuffix(".__init__")
    is_face = inside == there or inside in _public_inside(files) or inside in _face(there, files)
    if not is_face:
        yield f"imports {inside}, a private module of {there}; import the name from jaxdist.{there}"


def _circles(files: Files) -> Iterator[str]:
    """Circles between the entries of one folder, for every folder."""
    arrows: dict[str, dict[str, set[str]]] = collections.defaultdict(
        lambda: collections.defaultdict(set)
    )
    for name, source in files.items():
        for dotted, _ in _imports(source):
            if not dotted.startswith("jaxdist"):
                continue
            here, there = name.split("."), _module(dotted, files).split(".")
            shared = 0
            while shared < min(len(here), len(there)) and here[shared] == there[shared]:
                shared += 1
            if shared < min(len(here), len(there)) and "__init__" not in (
                here[shared],
                there[shared],
            ):
                arrows[".".join(here[:shared])][here[shared]].add(there[shared])
    for folder, edges in arrows.items():
        for entry in edges:
            if entry in _reached(entry, edges):
                yield f"{folder or 'jaxdist'}: {entry} imports itself through its neighbours"


def _reached(entry: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = list(edges[entry])
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo.extend(edges.get(one, ()))
    return found


def _name_faults(files: Files) -> Iterator[str]:
    """Underscores: once, on the room."""
    public = PUBLIC | _public_inside(files)
    for name in files:
        parts = name.split(".")
        room = parts[0]
        if len(parts) == 1 and room in {"__init__", "__main__"}:
            continue
        if not room.startswith("_") and room not in PUBLIC:
            yield f"{name}: the room {room} is not in PUBLIC, and has no underscore"
        if parts[-1] == "__init__" and ".".join(parts[:-1]) in public:
            continue
        marks = sum(p.startswith("_") for p in parts if p != "__init__")
        if marks == 0 and name not in public:
            yield f"{name} is in a public room: give it an underscore, or list it as public"
        if marks > 1:
            yield f"{name} has {marks} underscores; the one of its folder is enough"


def faults(files: Files) -> list[str]:
    """Sentences on all that is not as the table and the rules want it."""
    known = {room for rooms in ROWS for room in rooms} | {OUTSIDE}
    strange = sorted({name.split(".")[0] for name in files} - known)
    if strange:
        return [f"{room} is a room that the table does not know" for room in strange]
    found = [f"{name} {fault}" for name in files for fault in _import_faults(name, files)]
    found += [f"{n} {fault}" for n in files for fault in _process_faults(n, files[n])]
    return [*found, *_circles(files), *_name_faults(files)]


def test_imports_run_downward_and_through_the_faces_of_rooms() -> None:
    assert faults(_files()) == []


def test_user_input_never_meets_an_assert() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, source in _files().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert)
    ]
    assert found == [], "raise an error of jaxdist.errors that says what to do"


@pytest.mark.parametrize(
    ("here", "source", "fault"),
    [
        ("_values.mean", "from jaxdist._strategies import Strategy", "higher row"),
        ("_values.mean", "def f():\n    import jaxdist._program.trace.trace", "higher row"),
        ("_mesh", "if TYPE_CHECKING:\n    from jaxdist._values import PerReplica", "higher row"),
        (
            "_mesh",
            "if TYPE_CHECKING:\n    from jaxdist._values import x\n\n_open_late(__name__)",
            "higher row",
        ),
        ("_strategies.base", "if TYPE_CHECKING:\n    from jaxdist._mesh import build", "inside"),
        ("_replica", "from jaxdist import _strategies", "higher row"),
        ("_strategies.base", "from jaxdist import MirroredStrategy", "higher row"),
        ("_strategies.base", "import jaxdist", "higher row"),
        ("_values.mean", "from jaxdist._collectives import all_reduce", "own row"),
        ("_program.run.step", "from jaxdist.data import batches", "own row"),
        ("_program.run.step", "from jaxdist.testing import virtual_devices", "no room"),
        ("_program.run.step", "from jax._src import core", "private"),
        ("_program.run.step", "def f():\n    import jax._src.core as core", "private"),
        ("training._loop", "import pickle", "pickle"),
        ("tpu._slice", "import jax.numpy as jnp", "without jax"),
        ("_program.trace.trace", "from jaxdist._program.run.step import Step", "higher row"),
        ("_program.nnx.graph", "from jaxdist._program.proof.pieces import x", "own row"),
        ("_strategies.base", "from jaxdist._program.run.step import Step", "private module"),
        ("_strategies.base", "from jaxdist.tpu._topology import Topology", "private module"),
        ("_strategies.base", "from jaxdist.tpu import _topology", "private module"),
        (
            "_strategies.base",
            "def f():\n    from jaxdist._mesh import build",
            "inside of a function",
        ),
        ("_values.kinds", "from jaxdist._values.mean import divided", "through its neighbours"),
        ("_values.mean", "import jax\nme = jax.process_index()", "uses jax.process_index"),
        ("data._place", "import jax\ncount = jax.process_count", "uses jax.process_count"),
        ("cli._info", "import jax\njax.distributed.initialize()", "uses jax.distributed"),
        ("cli._info", "import jax.distributed", "uses jax.distributed"),
        ("_mesh", "from jax import process_index", "uses jax.process_index"),
        (
            "_devices.chips",
            "def f():\n    from jax.distributed import initialize",
            "jax.distributed",
        ),
        ("jobs.digits._task", "from jaxdist.jobs._task import Task", "public names only"),
        ("jobs.digits._task", "from jaxdist.jobs import _tables", "public names only"),
        ("jobs.digits._model", "from jaxdist._values import Variable", "public names only"),
        ("jobs._task", "from jaxdist import Strategy", "higher row"),
        ("_values._mean", "", "2 underscores"),
        ("data.sources", "", "is in a public room"),
        ("values", "", "does not know"),
    ],
)
def test_planted_fault_is_found(here: str, source: str, fault: str) -> None:
    circle = {"_values.mean": "from jaxdist._values.kinds import stops"}
    planted = {**_files(), **(circle if "neighbours" in fault else {}), here: source}
    assert any(fault in sentence for sentence in faults(planted))


@pytest.mark.parametrize(
    ("here", "source"),
    [
        ("_collectives.in_replica", "from jaxdist._values import PerReplica"),
        ("_program.run.step", "from jaxdist._replica import ReplicaContext"),
        ("_program.run.step", "from jaxdist._program.trace.trace import Traced"),
        ("_processes.process", "import jax\ncount = jax.process_count()"),
        ("cost._links_of", "def f(device):\n    return device.process_index"),
        ("_compat.arrays", "from jax._src import core"),
        ("_compat.arrays", "from jaxdist._compat.tracing import inside_trace"),
        ("_strategies.base", "from jaxdist._devices import runtime"),
        (
            "_strategies.__init__",
            "if TYPE_CHECKING:\n    from jaxdist._mesh import build\n\n_open_late(__name__)",
        ),
        ("_strategies.tpu", "from jaxdist.tpu.experimental import Topology"),
        ("__init__", "from jaxdist import testing as testing"),
        ("__init__", "from jaxdist import experimental as experimental"),
        ("cli._train", "from jaxdist.jobs import train"),
        ("cli._train", "import jaxdist"),
    ],
)
def test_import_that_runs_downward_is_left_alone(here: str, source: str) -> None:
    files = _files()
    assert list(_import_faults(here, {**files, here: source})) == []
    assert list(_process_faults(here, source)) == []
