"""The tree of errors."""

import ast
import builtins
import inspect
import pathlib
import pickle

import pytest

from jaxdist import errors
from jaxdist.errors import JaxdistError

# Each error, and the built-in that `except` clauses written for tf.distribute catch.
TREE = {
    "InvalidArgumentError": ValueError,
    "ShapeError": ValueError,
    "DeviceError": ValueError,
    "TopologyError": ValueError,
    "CoordinateError": IndexError,
    "NotFoundError": RuntimeError,
    "ArgumentError": ValueError,
    "RowIndexError": IndexError,
    "ArgumentTypeError": TypeError,
    "CallArgumentsError": ValueError,
    "UnsupportedError": NotImplementedError,
    "ReplicaValueError": ValueError,
    "DonationError": ValueError,
    "StateDivergenceError": ValueError,
    "ShardedArrayError": ValueError,
    "ContextError": RuntimeError,
    "MixedStrategyError": RuntimeError,
    "InputContextError": ValueError,
    "SeveralProcessesError": ValueError,
    "AxisNameError": NameError,
    "DivergentCollectiveError": RuntimeError,
    "ReplicaDriftError": RuntimeError,
    "NoRowsError": ValueError,
    "NotFiniteError": FloatingPointError,
    "BackendStartedError": RuntimeError,
    "ConfigError": ValueError,
    "CheckpointError": RuntimeError,
    "DamagedCheckpointError": RuntimeError,
    "BucketError": RuntimeError,
    "NonFiniteLossError": ArithmeticError,
    "OutOfRangeError": StopIteration,
    "OtherProcessError": RuntimeError,
    "DeadlineExceededError": TimeoutError,
    "UnavailableError": RuntimeError,
    "PSUnavailableError": RuntimeError,
    "WorkerUnavailableError": RuntimeError,
    "ProgramMismatchError": RuntimeError,
    "SavedProgramError": RuntimeError,
    "CancelledError": RuntimeError,
    "ClosureInputError": RuntimeError,
    "ClusterError": ValueError,
    "DuplicateTaskError": ValueError,
    "LaunchError": RuntimeError,
    "UnauthenticatedError": PermissionError,
    "UnknownError": RuntimeError,
    "MissingExtraError": ImportError,
    "MissingModuleError": ImportError,
    "MissingNameError": AttributeError,
}
WARNINGS = {
    "DividedMetricWarning",
    "RetraceWarning",
    "StateDivergenceWarning",
    "UnevenMeanWarning",
}

# Built-ins that Python's own protocols ask for, one in the words of JAX, and one that only a
# fault of the package raises.
PROTOCOLS = {
    ("_called.py", "RuntimeError"),
    ("_compat/arrays.py", "RuntimeError"),
    ("_late.py", "AttributeError"),
    # As dicts and files raise them.
    ("_processes/store.py", "KeyError"),
    ("_buckets/path.py", "FileNotFoundError"),
    ("_checkpoints/bucket_storage.py", "FileExistsError"),
    ("_checkpoints/local_storage.py", "OSError"),
}
FILES = sorted(pathlib.Path(errors.__file__).parent.rglob("*.py"))


def _raised_with_a_message(source: str) -> set[str]:
    """Names of the built-in exceptions that a module raises and says something with."""
    calls = [
        node.exc.func
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    return {
        name
        for name in names
        if inspect.isclass(kind := getattr(builtins, name, None))
        and issubclass(kind, BaseException)
        and kind is not SystemExit
    }


def test_every_error_that_says_something_is_one_of_ours() -> None:
    root = pathlib.Path(errors.__file__).parent
    found = {
        (path.relative_to(root).as_posix(), name)
        for path in FILES
        for name in _raised_with_a_message(path.read_text())
    }
    assert found == PROTOCOLS


def test_a_built_in_error_is_found_in_a_module() -> None:
    assert _raised_with_a_message("def f():\n    raise ValueError('x')") == {"ValueError"}
    assert _raised_with_a_message("raise StopIteration") == set()


def _text(node: ast.expr) -> str:
    """What a message says, with `{}` for each part that is not written out."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "{}"


def _without_three_paragraphs(source: str) -> list[str]:
    """Messages of errors of ours in which what was found, the rule or the remedy is missing.

    One that ends in a part that is not written out may have the rest in that part.
    """
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
            continue
        if node.func.id in {"refuse", "refuse_type"}:
            wrong += [f"line {x.lineno}: {_text(x)}" for x in node.args if "\n\n" in _text(x)]
            continue
        if node.func.id not in {*TREE} - {"MissingNameError"}:
            continue
        text = _text(node.args[0])
        blank_lines = text.count("\n\n")
        if blank_lines > 2 or (blank_lines < 2 and not text.endswith("{}")):
            wrong.append(f"line {node.lineno}: {text}")
    return wrong


def test_every_message_says_what_was_found_then_the_rule_then_the_remedy() -> None:
    root = pathlib.Path(errors.__file__).parent
    wrong = {
        path.relative_to(root).as_posix(): found
        for path in FILES
        if (found := _without_three_paragraphs(path.read_text()))
    }
    assert wrong == {}


def _refused_by_hand(source: str) -> list[str]:
    """Messages that say "was given" and have three paragraphs, which `refuse` would write."""
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TREE
    ]
    texts = [(node.lineno, _text(node.args[0])) for node in calls if node.args]
    return [
        f"line {line}: {text}"
        for line, text in texts
        if " was given " in text.partition("\n\n")[0] and text.count("\n\n") == 2
    ]


# `refuse` itself, and errors that begin with an option, a value or a result instead of a call.
_ABOUT_OTHERS = {
    "_called.py",
    "_collectives/cross_device/base.py",
    "_devices/runtime.py",
    "cli/_bench.py",
    "cli/_plan.py",
}


def test_one_function_writes_the_errors_about_wrong_arguments() -> None:
    root = pathlib.Path(errors.__file__).parent
    files = [p for p in FILES if p.relative_to(root).as_posix() not in _ABOUT_OTHERS]
    found = {p.relative_to(root).as_posix(): _refused_by_hand(p.read_text()) for p in files}
    assert {file: lines for file, lines in found.items() if lines} == {}
    by_hand = 'raise ShapeError(f"{name} was given x.\\n\\nIt has rows.\\n\\nPass {more}.")'
    assert len(_refused_by_hand(by_hand)) == 1


def test_a_message_without_a_remedy_is_found() -> None:
    ours = 'raise ShapeError(f"{name} has {rows} rows.\\n\\n{rows} is no multiple of 8." {more})'
    assert len(_without_three_paragraphs(ours.replace("{more}", ""))) == 1
    assert _without_three_paragraphs(ours.replace("{more}", '"\\n\\nUse 8."')) == []
    assert len(_without_three_paragraphs(ours.replace("{more}", '"\\n\\nUse 8.\\n\\nOr 16."'))) == 1
    assert _without_three_paragraphs('raise ShapeError(f"{name} has no rows.\\n\\n{rest}")') == []


def _classes() -> dict[str, type]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }


def test_the_tree_is_complete() -> None:
    assert set(_classes()) == {*TREE, *WARNINGS, "JaxdistError"}


@pytest.mark.parametrize("name", TREE)
def test_an_error_is_ours_and_the_builtin_that_fits(name: str) -> None:
    kind = _classes()[name]
    assert issubclass(kind, JaxdistError)
    assert issubclass(kind, TREE[name])


def test_mixing_strategies_is_a_wrong_context() -> None:
    assert issubclass(errors.MixedStrategyError, errors.ContextError)


@pytest.mark.parametrize("name", sorted(WARNINGS))
def test_a_warning_is_a_user_warning(name: str) -> None:
    assert issubclass(_classes()[name], UserWarning)


@pytest.mark.parametrize("name", [*TREE, *sorted(WARNINGS)])
def test_an_error_says_when_it_is_raised_and_stands_in_the_docstring_of_the_module(
    name: str,
) -> None:
    kind = _classes()[name]
    assert (kind.__doc__ or "").startswith(("Raised ", "Warns "))
    assert name in (errors.__doc__ or "")


@pytest.mark.parametrize("name", TREE)
def test_an_error_goes_to_another_process_and_back(name: str) -> None:
    again = pickle.loads(pickle.dumps(_classes()[name]("args[0]: what")))
    assert type(again).__name__ == name
    assert str(again) == "args[0]: what"
