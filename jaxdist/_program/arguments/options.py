"""The options of one call of `run`."""

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from jaxdist._called import call_as, called, refuse, refuse_type
from jaxdist._program.arguments.compiler_options import (
    CompilerOption,
    CompilerOptions,
    as_compiler_options,
)
from jaxdist._validate import as_flag, as_list, as_path, show


class RunOptions(NamedTuple):
    """Options of `Strategy.run` and `Strategy.lower`.

    Args:
        experimental_enable_dynamic_batch_size: An option for TPUs. It has no effect, because every
            program of jaxdist has static shapes. A value other than the default is logged once.
        experimental_bucketizing_dynamic_shape: Likewise.
        experimental_xla_options: Likewise. Use `compiler_options`.
        donate_argnums: Positions of arguments whose buffers the step may reuse for its results.
            They cannot be used after the call.
        static_argnames: Names of arguments that are static instead of traced, such as a number
            that decides a shape. They must be hashable.
        compiler_options: Options of XLA's compiler, by name: bools, numbers or strings. The
            platform and JAX's version determine which exist. They are part of the program: other
            options need another compilation. In a `jaxdist.function`, they apply to the whole
            function. They have no effect on a step in another function that JAX compiles, op by op,
            or on a worker of parameter servers, and a log line says so.
        saved_program: A file of `CompiledProgram.save` or `jaxdist plan --save`, which is loaded
            instead of compiling. It is code: load only files that you trust. For other inputs,
            such as an uneven last batch, the step is compiled. It is for `run` only: in other
            functions that are compiled (`jax.jit`, `jaxdist.function`), op by op and on workers of
            parameter servers it has no effect, and a log line says so; `lower(...).compile()` and
            `check_gradients` compile.

    Example:
        >>> strategy = MirroredStrategy()
        >>> strategy.run(lambda n: jnp.ones(n), (3,), options=RunOptions(static_argnames=("n",)))
        Array([1., 1., 1.], dtype=float32)
        >>> options = RunOptions(compiler_options={"xla_cpu_enable_fast_math": False})
        >>> float(strategy.run(lambda x: x + 1, (1.0,), options=options))
        2.0

    Source:
        `tf.distribute.RunOptions`; `donate_argnums`, `static_argnames` and `compiler_options` of
        `jax.jit`.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
    donate_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    compiler_options: Mapping[str, CompilerOption] | CompilerOptions = ()
    saved_program: str | os.PathLike[str] | None = None


@called("RunOptions")
def check_options(options: Any) -> RunOptions:
    """Check `options` and return them with tuples as fields."""
    if not isinstance(options, RunOptions):
        raise call_as(
            "strategy.run",
            refuse_type,
            f"options={show(options)}.",
            "options is a jaxdist.RunOptions.",
            "Pass options=jaxdist.RunOptions(donate_argnums=(0,)).",
        )
    for name in (
        "experimental_enable_dynamic_batch_size",
        "experimental_bucketizing_dynamic_shape",
    ):
        as_flag(name, getattr(options, name))
    _check_xla_options(options.experimental_xla_options)
    without_effect = options._replace(
        donate_argnums=(), static_argnames=(), compiler_options=(), saved_program=None
    )
    # Log once for each combination: a training loop passes the same options at every step.
    if without_effect != _DEFAULTS and repr(without_effect) not in _LOGGED:
        _LOGGED.add(repr(without_effect))
        _LOG.info("strategy.run: the experimental entries have no effect in %r", options)
    path = options.saved_program
    return RunOptions(
        donate_argnums=_as_tuple_of("donate_argnums", options.donate_argnums, int, "(0,)"),
        static_argnames=_as_tuple_of("static_argnames", options.static_argnames, str, "('n',)"),
        compiler_options=as_compiler_options(options.compiler_options),
        saved_program=None if path is None else as_path("saved_program", path, _FILE),
    )


_FILE = "step.program"
_LOG = logging.getLogger("jaxdist")
_LOGGED: set[str] = set()
_DEFAULTS = RunOptions()


@called("tpu.XLAOptions")
def _check_xla_options(given: Any) -> None:
    if given is None or isinstance(given, Mapping):
        return
    if type(given).__name__ == "XLAOptions":
        for name, value in given._asdict().items():
            as_flag(name, value)
        return
    raise call_as(
        "RunOptions",
        refuse_type,
        f"experimental_xla_options={show(given)}.",
        "It is a jaxdist.tpu.XLAOptions, as tf.distribute documents it, and has no effect here.",
        "Leave it out; options of XLA's compiler are RunOptions(compiler_options={...}).",
    )


def _as_tuple_of(name: str, given: Any, kind: type, example: str) -> tuple[Any, ...]:
    """Return one value or several values as a tuple of `kind`."""
    several = (given,) if isinstance(given, (str, kind)) else given
    # `as_list` refuses sets because they have no order; here the order does not matter.
    several = tuple(given) if isinstance(given, (set, frozenset)) else several
    remedy = f"Pass for instance RunOptions({name}={example})."
    what = f"one {kind.__name__}, or a tuple of several"
    held = tuple(as_list(name, several, what, remedy))
    if not all(type(x) is kind for x in held):
        raise refuse_type(f"{name}={show(given)}.", f"{name} is {what}.", remedy)
    return held


def check_names(given: Any) -> tuple[str, ...]:
    """Check names of parameters, and return them as a tuple. A single name is accepted, too."""
    remedy = "Pass for instance static_argnames=('n',)."
    several = (given,) if isinstance(given, str) else given
    names = as_list("static_argnames", several, "a list of names of parameters", remedy)
    if not all(isinstance(n, str) for n in names):
        raise refuse_type(
            f"static_argnames={show(given)}.", "Each entry is the name of a parameter.", remedy
        )
    return tuple(names)


def find_static_numbers(fn: Callable[..., Any], names: tuple[str, ...]) -> frozenset[int]:
    """Return the positions of the parameters of `fn` that have these names."""
    if not names:
        return frozenset()
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    # Without a signature the names cannot be checked. They still apply to keyword arguments.
    except (TypeError, ValueError):
        return frozenset()
    known = [p.name for p in parameters]
    # With `**kwargs`, every name may be a parameter.
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    unknown = [n for n in names if n not in known]
    if unknown and not takes_any:
        # Misspelled names are corrected.
        near = [
            n if n in known else next(iter(get_close_matches(n, known, 1)), None) for n in names
        ]
        fitting = tuple(dict.fromkeys(n for n in near if n is not None))
        raise refuse(
            f"static_argnames={names}, and the function has no parameter {unknown}.",
            f"static_argnames are names of its parameters: {known}.",
            f"Pass static_argnames={fitting}." if fitting else "Leave static_argnames out.",
        )
    return frozenset(i for i, n in enumerate(known) if n in names)
