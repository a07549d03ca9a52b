"""User source lines of operations and errors, tracebacks, and errors of JAX about pytrees."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from jax._src import source_info_util as _source_info
from jax._src import traceback_util as _traceback_util
from jax._src import tree_util as _tree_util
from jax.tree_util import keystr

# The folder of the package; code in it is not user code.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def find_source(eqn: Any) -> str:
    """Return `file:line (function)` of the user code that made an equation."""
    return _find_line(eqn.source_info)


def _find_line(source: Any) -> str:
    for frame in _source_info.user_frames(source.traceback):
        if not frame.file_name.startswith(PACKAGE):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return str(_source_info.summarize(source))


_JOBS = os.path.join(PACKAGE, "jobs", "")
_LIBRARIES = tuple(f"site-packages{os.sep}{n}{os.sep}" for n in ("flax", "optax", "chex"))


def find_caller_of_library(eqn: Any) -> str:
    """Return the line of `find_source`; if it is in Flax, Optax or Chex, also the caller's line."""
    return _find_caller_of_library(eqn.source_info)


def _find_caller_of_library(source: Any) -> str:
    first = _find_line(source)
    for frame in _source_info.user_frames(source.traceback):
        name = frame.file_name
        if not name.startswith(PACKAGE) and not any(part in name for part in _LIBRARIES):
            line = f"{name}:{frame.start_line} ({frame.function_name})"
            return line if line == first else f"{line}, in {first}"
    return first


_LAYERS = tuple(f"site-packages{os.sep}{n}{os.sep}" for n in ("flax", "haiku", "equinox", "keras"))


def is_called_by_layer(eqn: Any) -> bool:
    """Whether a library of layers made an equation itself, and not the function of the user."""
    for frame in _source_info.user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(PACKAGE):
            return any(part in frame.file_name for part in _LAYERS)
    return False


# Inside a function that JAX jits, only the outermost of its own functions is in the traceback.
_MEANS = ("mean", "_mean", "average", "_average")
_REDUCTIONS = os.path.join("jax", "_src", "numpy", "reductions.py")


def find_functions(eqn: Any) -> list[str]:
    """Return the qualified names of the functions that made an equation, the innermost first."""
    return [f.function_name for f in _source_info.user_frames(eqn.source_info.traceback)]


def is_from_file(eqn: Any, file: str) -> bool:
    """Whether a function of this file made an equation, directly or in a function it calls."""
    return any(f.file_name == file for f in _source_info.user_frames(eqn.source_info.traceback))


def is_from_library(eqn: Any, name: str) -> bool:
    """Whether a function of an installed package made an equation, or called one that did."""
    part = f"site-packages{os.sep}{name}{os.sep}"
    frames = _source_info.user_frames(eqn.source_info.traceback)
    return any(part in frame.file_name for frame in frames)


def is_from_mean(eqn: Any) -> bool:
    """Whether `jnp.mean` or `jnp.average` made an equation."""
    traceback = eqn.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        name = frame.file_name
        if _source_info.is_user_filename(name) and not name.startswith(PACKAGE):
            return False
        if frame.function_name in _MEANS and name.endswith(_REDUCTIONS):
            return True
    return False


def is_from_folder(eqn: Any, folder: str) -> bool:
    """Whether a function in this folder of the package made an equation, or called one that did."""
    return _has_frame(eqn.source_info, folder)


def is_called_from_folder(folder: str) -> bool:
    """Whether a function in this folder of the package is among the callers of the caller."""
    return _has_frame(_source_info.current(), folder)


def _has_frame(source: Any, folder: str) -> bool:
    start = PACKAGE + folder.replace("/", os.sep)
    return any(f.file_name.startswith(start) for f in _source_info.user_frames(source.traceback))


def is_transposed(eqn: Any) -> bool:
    """Whether an operation comes from the transpose (the backward pass) of another one."""
    return "transpose(" in str(eqn.source_info.name_stack)


def find_callers_of_library() -> str:
    """Return the line of `find_callers_line`, with the caller's line if it is in a library."""
    return _find_caller_of_library(_source_info.current())


def find_callers_line() -> str:
    """Return `file:line (function)` of the user code that called the caller."""
    return _find_line(_source_info.current())


def find_line_in_user_code() -> str:
    """Return `file:line (function)` of the user code that is running.

    In functions that JAX jits itself, `find_callers_line` ends at the function of JAX.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _is_in_user_code(code):
            return f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    return "an unknown line"


def find_shape_asked_for() -> tuple[int, ...] | None:
    """Return the argument `shape` of the function of JAX that is running; None without one."""
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_in_user_code(frame.f_code):
        shape = frame.f_locals.get("shape")
        if isinstance(shape, (tuple, list)) and all(isinstance(n, int) for n in shape):
            return tuple(shape)
        frame = frame.f_back
    return None


def _is_in_user_code(code: Any) -> bool:
    name = code.co_filename
    return bool(_source_info.is_user_filename(name)) and not name.startswith(PACKAGE)


def find_line_of_error(error: BaseException) -> str:
    """Return `file:line (function)` of the innermost user code in a traceback."""
    found = "an unknown line"
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_in_user_code(code):
            found = f"{code.co_filename}:{traceback.tb_lineno} ({code.co_name})"
        traceback = traceback.tb_next
    return found


def find_line_of_model() -> str:
    """Return the innermost line among the callers that is of a model: of a user, or of a job here.

    Lines of Flax, Optax and Chex, which call functions of the model, are left out.
    """
    source = _source_info.current()
    for frame in _source_info.user_frames(source.traceback):
        name = frame.file_name
        is_here = name.startswith(PACKAGE) and not name.startswith(_JOBS)
        if not is_here and not any(part in name for part in _LIBRARIES):
            return f"{name}:{frame.start_line} ({frame.function_name})"
    return _find_line(source)


def get_current_source() -> Any:
    """Return the source information that an equation made here would get."""
    return _source_info.current()


# A source for operations that no message names; capturing a real one walks the Python stack.
NO_SOURCE = _source_info.new_source_info()


F = TypeVar("F", bound=Callable[..., Any])

_traceback_util.register_exclusion(PACKAGE.rstrip(os.sep))

_NOTE = (
    "--------------------\nFor simplicity, jaxdist and JAX have removed their internal frames from "
    "the traceback of this exception. Set JAX_TRACEBACK_FILTERING=off to include these."
)


def hide_frames(error: BaseException) -> None:
    """Remove the frames of jaxdist and JAX from the traceback of an exception.

    It follows `jax_traceback_filtering`, as JAX's own functions do. If such functions are nested,
    only the outermost one removes frames. Waits for a public way to register frames.
    """
    mode = _traceback_util._filtering_mode()
    if mode == "off" or _traceback_util._is_under_reraiser(error):
        return
    traceback = error.__traceback__
    if mode == "tracebackhide":
        _traceback_util._add_tracebackhide_to_hidden_frames(traceback)
    elif traceback is not None:
        error.with_traceback(_traceback_util.filter_traceback(traceback))
        # JAX has left the same note where the error came through one of its functions.
        notes = getattr(error, "__notes__", [])
        if mode == "quiet_remove_frames" and not any("internal frames" in n for n in notes):
            # Python prints notes in order, and users read the last one: notes about the error
            # itself follow.
            error.__notes__ = [_NOTE, *notes]


def with_hidden_frames(fn: F) -> F:
    """Wrap a function so that its exceptions have no frames of jaxdist and JAX."""

    @functools.wraps(fn)
    def call_and_hide_frames(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    return cast(F, call_and_hide_frames)


_TREE_ERROR = "_prefix_error"


def explain_tree_errors(kind: type, explain: Callable[[str, Any, Any], Exception | None]) -> None:
    """Let `jax.tree.map`, `jit(out_shardings=)` and others raise other errors for a class of nodes.

    JAX looks for the place where two pytrees differ only after it has found that they do. Waits for
    a public way to describe a node in such errors.

    Args:
        kind: A class of pytree nodes.
        explain: Called with the place, the node and what the other tree has there. Returns an
            error, or None where they do not differ.
    """
    original = getattr(_tree_util, _TREE_ERROR, None)
    if original is None:
        return

    def find_error(
        key_path: Any,
        prefix_tree: Any,
        full_tree: Any,
        is_leaf: Callable[[Any], bool] | None = None,
    ) -> Iterator[Callable[[str], Exception]]:
        is_node = isinstance(prefix_tree, kind) and not (is_leaf and is_leaf(prefix_tree))
        if not is_node or explain("", prefix_tree, full_tree) is None:
            yield from original(key_path, prefix_tree, full_tree, is_leaf)
            return

        def raise_error(name: str) -> Exception:
            # Raised here: some functions would only copy its text into an error of JAX.
            error = explain(f"{name}{keystr(key_path)}", prefix_tree, full_tree)
            raise error or ValueError(name)

        yield raise_error

    setattr(_tree_util, _TREE_ERROR, find_error)
