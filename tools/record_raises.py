"""A plugin of pytest that records which `raise` statements of the package are executed.

See Note [Raises] in `tools.raises`.

An import hook rewrites `raise error` to `raise record(key, error)`. Lines, names and tracebacks
stay as they are, and code that raises nothing runs as before.
"""

import ast
import builtins
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from tools import raises

_Node = TypeVar("_Node", bound=ast.AST)

# A built-in, since tests look at all names of the modules that are rewritten.
_NAME = "__record_raise_of_{}__"


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Record where all tests run: here, since later the package is already imported."""
    config = pluginmanager.get_plugin("pytestconfig")
    arguments = config.invocation_params.args if config is not None else ()
    if raises.VARIABLE not in os.environ and {"--all", "--long"} & set(arguments):
        raises.RECORD.unlink(missing_ok=True)
        os.environ[raises.VARIABLE] = str(raises.RECORD)  # For the processes of xdist, too.
    if raises.VARIABLE in os.environ:
        install(raises.PACKAGE, pathlib.Path(os.environ[raises.VARIABLE]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of `--long` where a `raise` is neither reached nor listed, or both.

    A run of `--all`, or of `--rest` after the short run, only names them: the rows that `--long`
    adds reach some of them.
    """
    if not _ran_all(session):
        return
    reached = raises.read_record(pathlib.Path(os.environ[raises.VARIABLE]).read_text())
    found = raises.find(raises.PACKAGE)
    faults = raises.find_faults(raises.LISTED.read_text(), found, reached)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if faults and not session.config.option.long and reporter is not None:
        reporter.section("raises")
        reporter.write_line(raises.make_report(faults))
    elif faults:
        report = pytest.TestReport(
            nodeid="every raise is reached or listed",
            location=(raises.LISTED.name, None, "every raise is reached or listed"),
            keywords={},
            outcome="failed",
            longrepr=raises.make_report(faults),
            when="call",
        )
        session.config.hook.pytest_runtest_logreport(report=report)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _ran_all(session: pytest.Session) -> bool:
    option = session.config.option
    is_part = (
        hasattr(session.config, "workerinput")
        or session.config.args_source is pytest.Config.ArgsSource.ARGS
        or option.collectonly
        or option.keyword
        or option.markexpr
        or option.deselect
        or getattr(option, "lf", False)
        or getattr(option, "part", None)
        or session.shouldstop
        or session.shouldfail
    )
    # The short run has written into the same file before.
    is_second_part = getattr(option, "rest", False) and raises.VARIABLE in os.environ
    return (option.all or option.long or is_second_part) and not is_part


def install(package: pathlib.Path, file: pathlib.Path) -> None:
    """Append to `file` each `raise` of `package` that this process executes, the first time only.

    The package must not be imported yet.
    """
    if package.name in sys.modules:
        raise RuntimeError(f"{package.name} is already imported, so its raises cannot be recorded")
    file.parent.mkdir(parents=True, exist_ok=True)
    setattr(builtins, _NAME.format(package.name), _make_record(file))
    sys.meta_path.insert(0, _Finder(package))


def _make_record(file: pathlib.Path) -> Callable[..., Any]:
    # Tests replace functions of `os`, fork, and end processes: each line is written at once, by a
    # function that is bound here. Lines of several processes do not mix, since each is one append.
    write = os.write
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    seen: set[str] = set()

    def record(key: str, error: Any = None) -> Any:
        # Unset while pytest imports and collects, which proves nothing about an error.
        test = os.environ.get("PYTEST_CURRENT_TEST")
        if test is not None and key not in seen:
            seen.add(key)
            # `raise` alone gives no error: it raises what is being handled.
            error = sys.exception() if error is None else error
            kind = error if isinstance(error, type) else type(error)
            # The end is ` (call)`, or another phase.
            write(out, f"{key}\t{kind.__name__}\t{test.rpartition(' (')[0]}\n".encode())
        return error

    return record


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what Python finds, with another loader."""

    def __init__(self, package: pathlib.Path) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != self._package.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(self._package, fullname, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, package: pathlib.Path, fullname: str, path: str) -> None:
        super().__init__(fullname, path)
        self._package = package

    def get_code(self, fullname: str) -> types.CodeType:
        # Neither reads nor writes `__pycache__`, where Python keeps the code as it is.
        file = pathlib.Path(self.path).relative_to(self._package).as_posix()
        tree = ast.parse(self.get_data(self.path))
        name = _NAME.format(self._package.name)
        marked = _Marker(raises.find_in_tree(tree, file), name).visit(tree)
        code: types.CodeType = compile(marked, self.path, "exec", dont_inherit=True)
        return code


class _Marker(ast.NodeTransformer):
    def __init__(self, found: dict[ast.Raise, raises.Raise], name: str) -> None:
        self._found = found
        self._name = name

    def visit_Raise(self, node: ast.Raise) -> ast.AST | list[ast.AST]:
        record = ast.Name(self._name, ast.Load())
        key = ast.Constant(self._found[node].key)
        if node.exc is not None:
            node.exc = _place(ast.Call(record, [key, node.exc], []), node.exc)
            return node
        return [_place(ast.Expr(ast.Call(record, [key], [])), node), node]


def _place(new: _Node, old: ast.AST) -> _Node:
    return ast.fix_missing_locations(ast.copy_location(new, old))
