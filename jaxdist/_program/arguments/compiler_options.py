"""Checks the compiler options of users, and decides which compilation gets them."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._called import call_as, called, name_call, refuse, refuse_type
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import log_without_effect, show
from jaxdist._values import current_binding
from jaxdist.errors import ArgumentError, ContextError

CompilerOption = bool | int | float | str | bytes
# Sorted by name, and hashable: they are part of the key of a program.
CompilerOptions = tuple[tuple[str, CompilerOption], ...]

IN_JIT = "in a function that JAX compiles"
OP_BY_OP = "op by op"
ON_SERVERS = "on workers of parameter servers"
_WHY = {
    IN_JIT: (
        "JAX compiles the function around the step; pass them to jax.jit(compiler_options=...), or "
        "use jaxdist.function"
    ),
    OP_BY_OP: "nothing is compiled as a whole",
    ON_SERVERS: "each worker compiles the functions that it is sent with the options of its own "
    "process (XLA_FLAGS)",
}

_WHY_NOT_SAVED = "it is the program of the step alone, as strategy.run compiles it"
_CLASSES_OF_JAX = ("ExecutableBuildOptions", "CompileOptions", "EffortLevel")
_LOG = logging.getLogger("jaxdist")
_LOGGED: set[CompilerOptions] = set()
_EXAMPLE = "compiler_options={'xla_tpu_scoped_vmem_limit_kib': 65536}"
_RULE = (
    "compiler_options are names of options of XLA's compiler, without leading dashes, with bools, "
    "numbers of up to 64 bits, or strings."
)


def as_compiler_options(given: Any) -> CompilerOptions:
    """Check compiler options, and return them as pairs sorted by name.

    Args:
        given: A mapping, or pairs of names and values.

    Raises:
        ArgumentTypeError: `given` is neither, or a name or value has the wrong type.
        ArgumentError: A name begins with dashes, or occurs twice.
    """
    if given is None:
        return ()
    found: dict[str, CompilerOption] = {}
    for name, value in _list_pairs(given):
        bare = value.item() if isinstance(value, np.generic) else value
        is_profile = name == "fdo_profile" and isinstance(bare, bytes)
        is_value = isinstance(bare, (bool, int, float, str)) or is_profile
        is_too_large = isinstance(bare, int) and not -(1 << 63) <= bare < 1 << 63
        if not isinstance(name, str) or not is_value or is_too_large:
            is_name = isinstance(name, str)
            shown = f"{name} = {show(value)}" if is_name else f"the name {show(name)}"
            raise refuse_type(
                f"compiler_options with {shown}.", _RULE, f"Pass for instance {_EXAMPLE}."
            )
        if not name or name != name.strip().lstrip("-"):
            raise refuse(
                f"compiler_options with the name {name!r}.",
                _RULE,
                f"Pass {name.strip().lstrip('-') or 'the name of an option'!r}.",
            )
        if name in found:
            raise refuse(
                f"{name} twice in compiler_options, as {found[name]!r} and {value!r}.",
                "An option has one value.",
                "Leave one of them out.",
            )
        found[name] = bare
    return tuple(sorted(found.items()))


def _list_pairs(given: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(given, Mapping):
        return list(given.items())
    if isinstance(given, (tuple, list)) and all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in given
    ):
        return [(name, value) for name, value in given]
    raise refuse_type(f"compiler_options={show(given)}.", _RULE, f"Pass for instance {_EXAMPLE}.")


def format_options(options: CompilerOptions) -> str:
    """Return options as text, such as `xla_a=true, xla_b=5`."""
    return ", ".join(f"{name}={_format_value(value)}" for name, value in options)


def _format_value(value: CompilerOption) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes, sha256 {hashlib.sha256(value).hexdigest()[:12]}"
    return str(value).lower() if isinstance(value, bool) else str(value)


@called(lambda name: name)
def add_options(
    needed: Mapping[str, Any], asked: CompilerOptions, name: str, layout: ReplicaMesh
) -> dict[str, Any]:
    """Return the options that a program needs and those that the user asked for.

    Args:
        needed: Options without which the program cannot be compiled, or computes wrong bits.
        asked: The options of the user.
        name: The name of the step.
        layout: The layout of the strategy.

    Raises:
        ArgumentError: The program needs another value of an option.
    """
    for option, value in asked:
        wanted = needed.get(option, value)
        # A bool may also be given as a string, in upper or lower case.
        is_flag = isinstance(wanted, bool) or isinstance(value, bool)
        if str(wanted) == str(value) or (is_flag and _format_value(wanted) == str(value).lower()):
            continue
        why = (
            "A plan for GPUs is compiled without a GPU"
            if layout.is_described_gpu
            else "With deterministic=True, XLA keeps the order of sums"
        )
        raise refuse(
            f"compiler_options {option}={_format_value(value)}.",
            f"{why}, which needs {option}={_format_value(wanted)}.",
            f"Leave {option} out.",
        )
    if asked and layout.num_virtual is not None and asked not in _LOGGED:
        _LOGGED.add(asked)
        _LOG.warning(
            "%s: deterministic=True with compiler_options %s. Other numbers of devices give the "
            "same bits only if these options do not change the order of sums.",
            name,
            format_options(asked),
        )
    return {**dict(asked), **needed}


@called(lambda name: name)
def refuse_option(error: Exception, asked: CompilerOptions, name: str) -> ArgumentError | None:
    """Return the error for an option that the compiler does not accept; None for another error."""
    text = str(error).partition("\n")[0]
    # JAX sets some options itself, and refuses values of other types with a nanobind error.
    is_raw = isinstance(error, (TypeError, ValueError))
    is_type = is_raw and any(kind in str(error) for kind in _CLASSES_OF_JAX)
    is_status = isinstance(error, jax.errors.JaxRuntimeError) and "INVALID_ARGUMENT" in text
    if not asked or not (is_type or (is_status and any(option in text for option, _ in asked))):
        return None
    reason = "A value has another type than the option" if is_type else text
    return refuse(
        f"compiler_options {format_options(asked)}, and XLA's compiler does not accept them: "
        f"{reason}",
        f"Each platform has its own options, and this is JAX {jax.__version__}. {_RULE}",
        "Correct the name or the value, or leave the option out.",
    )


def request_options(options: Mapping[str, Any]) -> bool:
    """Request options from the `jaxdist.function` that will compile the caller.

    Args:
        options: Options with which the program of the caller must be compiled.

    Returns:
        Whether such a function exists.

    Raises:
        ContextError: Another step in the function needs another value of an option.
    """
    binding: Any = current_binding()
    if binding is None:
        return False
    known: dict[str, Any] = binding.compiler_options or {}
    for option, value in options.items():
        if known.setdefault(option, value) != value:
            raise ContextError(
                f"{name_call()} was called in a jaxdist.function with compiler_options {option}="
                f"{_format_value(value)}, and another step of the function has {option}="
                f"{_format_value(known[option])}.\n\n"
                "All steps of the function are one program, which is compiled with one set of "
                f"options.\n\nPass the same {option} to both."
            )
    binding.compiler_options = known or None
    return True


def log_options_without_effect(asked: CompilerOptions, saved_program: Any, why: str) -> None:
    """Log that compiler options and a saved program have no effect, once for each reason."""
    if asked:
        call_as(f"{name_call()} {why}", log_without_effect, "compiler_options", _WHY[why])
    if saved_program:
        call_as(f"{name_call()} {why}", log_without_effect, "saved_program", _WHY_NOT_SAVED)
