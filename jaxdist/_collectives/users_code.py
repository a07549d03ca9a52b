"""Errors of user code that jaxdist calls while it traces a step."""

import contextlib
from collections.abc import Iterator

import jax

from jaxdist.errors import ArgumentTypeError, JaxdistError


@contextlib.contextmanager
def annotate_errors(what: str, given: str) -> Iterator[None]:
    """Add to every error of the block that `what` was called with values `given`.

    Errors keep their type. JAX's errors about traced values become one that gives the remedy.
    """
    try:
        yield
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        # JAX's messages have many lines about tracers; the first one has the cause.
        first = str(error).partition("\n")[0]
        raise ArgumentTypeError(
            f"{what}, called for {given}, used the number of a traced value: {first}"
            "\n\nIt is called once, while the program is traced. Values have no numbers then.\n\n"
            "Use jax.numpy instead of numpy, jnp.where instead of if, and no float(), int() or "
            ".item()."
        ) from error
    # Our own errors already name the cause and the remedy.
    except JaxdistError:
        raise
    except Exception as error:
        error.add_note(f"Raised in {what}, called for {given}.")
        raise
