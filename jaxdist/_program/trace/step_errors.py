"""Better errors for a step with arrays in pieces, or with indices of slices among its leaves."""

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import optax
from flax import nnx

from jaxdist._called import called, refuse_type
from jaxdist._compat import ROW_NUMBERS_TAG, are_row_numbers
from jaxdist._values import is_sharded, make_arithmetic_error
from jaxdist.errors import JaxdistError, MissingNameError, ReplicaValueError

# Libraries that a transformation of optax calls, and that are not the cause.
_BENEATH = frozenset({"jax", "jaxlib", "numpy", "jaxdist", "flax"})

# Messages of errors about wrong arguments, from Python and optax.
_OF_CALLS = (
    "required positional argument",
    "required keyword-only argument",
    "unexpected keyword argument",
    "positional arguments but",
    "must be provided",
)

# Operations that JAX refuses only when it compiles the program.
_REFUSED_LATE = frozenset(
    {"psum", "psum_invariant", "psum2", "pmax", "pmin", "reduce_scatter", "sort", "top_k"}
)


def check_operands(name: str, operands: Iterable[Any], find_line: Callable[[], str]) -> None:
    """Check that an operation does not compute with the indices of `IndexedSlices`.

    JAX refuses the other such operations while it traces the function.

    Args:
        name: The name of the primitive.
        operands: Its operands, or their types.
        find_line: Returns the place of the operation, for the error.

    Raises:
        UnsupportedError: The operation computes with them.
    """
    if name in _REFUSED_LATE and any(are_row_numbers(x) for x in operands):
        raise make_arithmetic_error(f"{name}, at {find_line()},")


def _find_way_of_optimizer(error: AttributeError) -> str | None:
    is_method = error.name in ("apply_gradients", "compute_gradients", "minimize")
    if not is_method or isinstance(error, JaxdistError):
        return None
    reduced = "grads = get_replica_context().all_reduce('mean', jax.grad(loss)(params))"
    if isinstance(error.obj, nnx.Optimizer):
        return f"{reduced}; optimizer.update(model, grads)"
    if isinstance(error.obj, optax.GradientTransformation):
        return (
            f"{reduced}; updates, state = tx.update(grads, state, params); "
            "params = optax.apply_updates(params, updates)"
        )
    return None


@contextlib.contextmanager
def explain_methods_of_optimizers() -> Iterator[None]:
    """Raise a named error where an optimizer is called like one of TensorFlow or Keras."""
    try:
        yield
    except AttributeError as error:
        way = _find_way_of_optimizer(error)
        if way is None:
            raise
        text = (
            f"{type(error.obj).__name__}.{error.name} does not exist.\n\n"
            "Optimizers come from optax and Flax, and never all-reduce.\n\n"
            f"Write in the step: {way}."
        )
        raise MissingNameError(text, name=error.name, obj=error.obj) from error


@contextlib.contextmanager
def explain_row_numbers() -> Iterator[None]:
    """Raise a named error where JAX refuses to compute with the indices of `IndexedSlices`."""
    try:
        yield
    except (TypeError, ValueError, AssertionError) as error:
        text = str(error).partition("\n")[0]
        if isinstance(error, JaxdistError) or ROW_NUMBERS_TAG not in text:
            raise
        raise make_arithmetic_error(f"A function of JAX ({text})") from error


@called("A function that takes only arrays, such as those of jax.lax,")
def find_better_error(error: Exception, names: Sequence[str]) -> JaxdistError | None:
    """Return the error to raise instead of an error of a step that has arrays in pieces.

    Args:
        error: The error that the step raised.
        names: The names of the arguments that are in pieces.

    Returns:
        None if the pieces are not the cause.
    """
    is_of_arguments = isinstance(error, (TypeError, ValueError))
    text = str(error)
    # The error of trees with arrays in pieces does not know that an optimizer is the cause.
    is_ours = isinstance(error, JaxdistError) and "An array in pieces is a pytree node" not in text
    if not names or not is_of_arguments or is_ours:
        return None
    first = text.partition("\n")[0]
    # The remedies of the other error are left out.
    said = first if isinstance(error, JaxdistError) else " ".join(text.split())
    held = f"{len(names)} argument(s) are in pieces, such as {names[0]}."
    if "__jax_array__" in text:
        return refuse_type(
            f"an array in pieces: {first}",
            held,
            "Gather it before, jaxdist.partition.gather(value), or use jax.numpy, which gathers.",
        )
    is_of_structures = "pytree" in text and ("Sharded" in text or _maps_pieces(error))
    found = (
        "A function of several pytrees was given one with arrays in pieces and another with "
        "something else in their places"
    )
    if is_of_structures and not _passes_optimizer(error):
        return ReplicaValueError(
            f"{found}: {said} {held}\n\n"
            "All pytrees need pieces at the same positions. Only the first pytree may have a plain "
            "leaf, such as None, where the others have a piece.\n\n"
            "Gather the arrays before, inside of the differentiated function: "
            "jaxdist.partition.gather(tree). Or pass the pytree with the leaves first: "
            "jax.tree.map(fn, masks, arrays), eqx.combine(static, params)."
        )
    # A call with missing or surplus arguments fails for another reason than the pieces.
    is_about_call = any(words in text for words in _OF_CALLS)
    if is_of_structures or (_is_raised_by_optax(error) and not is_about_call):
        if not is_of_structures:
            found = f"A transformation of optax raised {type(error).__name__} in a step with pieces"
        return ReplicaValueError(
            f"{found}: {said} {held}\n\n"
            "The pytrees of a function have pieces in the same places. Optimizers whose state has "
            "other shapes than the parameters (adafactor, flatten), or that look at the dims of "
            "what a mask leaves (muon), cannot take pieces.\n\n"
            "Place the state of an optimizer with its model: jaxdist.partition.place(strategy, "
            "(model, optimizer), rules). For such an optimizer use tx = "
            "jaxdist.sharded_update(tx), which gives it whole arrays. A tree of masks or numbers "
            "comes first: jax.tree.map(lambda mask, grad: ..., masks, grads)."
        )
    return None


def _maps_pieces(error: Exception) -> bool:
    """Whether a function of pytrees raised the error, called where a pytree has pieces.

    JAX's message may name another place of the pytrees, where they do not differ.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # JAX may have removed its own frames from the traceback.
    callers = [f for f in frames if str(f.f_globals.get("__name__", "")).partition(".")[0] != "jax"]
    held = [*callers[-1].f_locals.values()] if callers else []
    return any(map(is_sharded, jax.tree.leaves(held, is_leaf=is_sharded)))


def _passes_optimizer(error: Exception) -> bool:
    """Whether the error was raised in a function of optax or of NNX optimizers."""
    return any(n.startswith(("optax.", "flax.nnx.training.")) for n in _list_modules(error))


def _is_raised_by_optax(error: Exception) -> bool:
    """Whether a transformation of optax raised the error, and not a function of the user."""
    # The innermost frame outside of the libraries decides: optax calls functions of the user.
    outside = [n for n in _list_modules(error) if n.partition(".")[0] not in _BENEATH]
    return bool(outside) and outside[-1].startswith("optax.")


def _list_modules(error: Exception) -> list[str]:
    """Return the names of the modules that an error passed, the outermost first."""
    frames = traceback.walk_tb(error.__traceback__)
    return [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]
