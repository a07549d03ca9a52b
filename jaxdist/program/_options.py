"""Options of one call of `run`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxdist.errors import ArgumentError, ArgumentTypeError


class RunOptions(NamedTuple):
    """Options of `Strategy.run` and `Strategy.lower`.

    Args:
        experimental_enable_dynamic_batch_size: Documented for TPUs; has no effect, since every
            program here has static shapes.
        experimental_bucketizing_dynamic_shape: Likewise.
        experimental_xla_options: Likewise; compile options of JAX go to `jax.jit`.
        donate_argnums: Positions of arguments whose buffers the step may reuse for its results.
            They cannot be used after the call.
        static_argnames: Names of arguments that are part of the program instead of traced, such
            as a number that decides a shape. They must be hashable.

    Example:
        >>> strategy = MirroredStrategy()
        >>> strategy.run(lambda n: jnp.ones(n), (3,), options=RunOptions(static_argnames=("n",)))
        Array([1., 1., 1.], dtype=float32)

    Source:
        `tf.distribute.RunOptions`; `donate_argnums` and `static_argnames` of `jax.jit`.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
    donate_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()


def checked(options: Any) -> RunOptions:
    """`options` with tuples in it, or a named error."""
    if not isinstance(options, RunOptions):
        raise ArgumentTypeError(
            f"options must be a jaxdist.RunOptions, and {type(options).__name__} was given.\n\n"
            "Pass options=jaxdist.RunOptions(donate_argnums=(0,))."
        )
    numbers, names = options.donate_argnums, options.static_argnames
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    names = (names,) if isinstance(names, str) else tuple(names)
    return options._replace(donate_argnums=numbers, static_argnames=names)


def static_numbers(fn: Callable[..., Any], names: tuple[str, ...]) -> frozenset[int]:
    """Positions of the parameters of `fn` with these names."""
    if not names:
        return frozenset()
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return frozenset()
    known = [p.name for p in parameters]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    unknown = [n for n in names if n not in known]
    if unknown and not takes_any:
        raise ArgumentError(
            f"RunOptions(static_argnames={names}): the step has no parameter {unknown}.\n\n"
            f"Its parameters are {known}."
        )
    return frozenset(i for i, n in enumerate(known) if n in names)
