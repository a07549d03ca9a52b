"""Code of users that is called while a step is traced."""

import contextlib
from collections.abc import Iterator

import jax

from jaxdist.errors import ArgumentTypeError, JaxdistError


@contextlib.contextmanager
def users_code(what: str, given: str) -> Iterator[None]:
    """Say in every error of the block that `what` was called, for values `given`.

    Errors keep their type; those of JAX about traced values become one that says what to do.
    """
    try:
        yield
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        first = str(error).partition("\n")[0]
        raise ArgumentTypeError(
            f"{what}, called for {given}, used the number of a traced value: {first}"
            "\n\nIt is called once, while the program is traced. Values have no numbers then.\n\n"
            "Use jax.numpy instead of numpy, jnp.where instead of if, and no float(), int() or "
            ".item()."
        ) from error
    except JaxdistError:
        raise
    except Exception as error:
        error.add_note(f"Raised in {what}, called for {given}.")
        raise
