"""`ClosureExporter`: programs that compute some results of the trace of a closure."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend.core import jaxpr_as_fun

from jaxdist import _compat
from jaxdist._parameter_server.closures.inputs import (
    StateLeaf,
    TraceInputs,
    make_used_after_error,
)
from jaxdist._parameter_server.closures.recorder import UPDATED
from jaxdist._parameter_server.protocol import as_array
from jaxdist._parameter_server.variables.ports import Port, RowRead, WorkerIndex
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._parameter_server.worker_protocol import Input, Lookup, Source
from jaxdist._program import FunctionTrace, contains, iterate_equations
from jaxdist.errors import ContextError, UnsupportedError

_CALLBACKS = frozenset(
    {"callback", "debug_callback", "debug_print", "io_callback", "pure_callback"}
)


def subtract(new: Any, old: Any) -> Any:
    """Return a difference."""
    # An infinite value that stays as it is changes by 0, and not by nan.
    return jnp.where(new == old, jnp.zeros_like(new), new - old)


class Output(NamedTuple):
    """A result of a trace, or what a function makes of it and of an input.

    Args:
        result: The number of the result.
        minus: The number of the input; None for the result itself.
        take: The function.
    """

    result: int
    minus: int | None = None
    take: Callable[[Any, Any], Any] = subtract


class ClosureExporter:
    """Exports programs that compute some results of a trace.

    Args:
        found: The trace.
        inputs: What its inputs are.
        platforms: The platforms of the workers, as `jax.export` names them.
    """

    def __init__(self, found: FunctionTrace, inputs: TraceInputs, platforms: Sequence[str]) -> None:
        self._found, self._inputs, self._platforms = found, inputs, platforms

    def export_lookup(self, origins: Sequence[Any]) -> Lookup | None:
        """Return the program that computes which rows the closure reads."""
        if not self._inputs.reads:
            return None
        number = {i: n for n, i in enumerate(self._found.written)}
        outputs: list[Output] = []
        for port in self._inputs.reads:
            result = number[id(port.role.ids)]
            slots = [self._inputs.slots[s] for s in origins[result].sources if isinstance(s, int)]
            wrong = next((x for x in slots if _is_of_variable(x)), None)
            if wrong is not None:
                raise ContextError(
                    f"{self._inputs.name} reads rows of {port.label!r} whose numbers depend on the "
                    f"variable {wrong.label!r}.\n\n"
                    "The worker reads rows before it runs the function, so their numbers come from "
                    "its arguments and batches.\n\nRead the variable as a whole "
                    "(table.value()[ids]), or pass the numbers as an argument."
                )
            outputs.append(Output(result))
        inputs, exported = self.export_outputs(outputs)
        return Lookup(as_array(exported), inputs)

    def export_outputs(self, outputs: Sequence[Output]) -> tuple[tuple[Input, ...], bytes]:
        """Return the inputs of a program that returns these outputs, and the program."""
        closed, slots = self._found.closed, self._inputs.slots
        needed = sorted({output.result for output in outputs})
        small, used = _compat.drop_unused(closed, needed)
        if contains(small, UPDATED.name):
            raise make_used_after_error(self._inputs.name, "a parameter")
        given = set(used) | {o.minus for o in outputs if o.minus is not None}
        zeros = {n: slots[n] for n in given if _is_zero(slots[n])}
        folded = {n for n in given if isinstance(slots[n], StateLeaf)}
        found = {n: self._inputs.find_key(n) for n in given}
        impls = {n: jax.random.key_impl(k) for n, k in found.items() if k is not None}
        _check_no_callback(self._inputs.name, small)
        plain = [n for n in sorted(given) if n not in zeros]
        place = {result: n for n, result in enumerate(needed)}
        body = jaxpr_as_fun(small)

        def program(number: Any, *values: Any) -> list[Any]:
            known = dict(zip(plain, values, strict=True))
            for n, impl in impls.items():
                known[n] = jax.random.wrap_key_data(known[n], impl=impl)
            for n in folded & impls.keys():
                known[n] = _fold_in(known[n], number)
            for n, port in zeros.items():
                known[n] = jnp.zeros(port.home.global_shape, port.dtype)
            # NumPy has no dtype for the indices of slices either; they are read as integers.
            results = list(map(_compat.unwrap_row_numbers, body(*(known[n] for n in used))))
            return [
                results[place[r]] if minus is None else take(results[place[r]], known[minus])
                for r, minus, take in outputs
            ]

        described = [self._inputs.describe(n) for n in plain]
        inputs = (Input(Source.NUMBER), *(one for one, _ in described))
        avals = [self._inputs.shape((), np.uint32), *(aval for _, aval in described)]
        program.__name__ = self._inputs.name
        exported = export.export(jax.jit(program), platforms=self._platforms)(*avals)
        return inputs, bytes(exported.serialize())


def _fold_in(keys: Any, number: Any) -> Any:
    # The layers of an `nnx.vmap` have an array of keys, and `fold_in` takes one.
    fold = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(keys, number)


def find_rest(new: Any, old: Any) -> Any:
    """Return what the rounding of `subtract(new, old)` has lost, where it matters for `new`.

    From 1e8 to 0.5 the difference is -1e8 in float32, and the rest 0.5. It is 0 where it is smaller
    than what `new` itself has lost by rounding.
    """
    # The error of a sum of two numbers, exactly (Knuth).
    difference = new - old
    lost_of_old = difference - new
    rest = (new - (difference - lost_of_old)) - (old + lost_of_old)
    matters = jnp.isfinite(rest) & (jnp.abs(rest) > jnp.finfo(new.dtype).eps * jnp.abs(new))
    return jnp.where(matters, rest, jnp.zeros_like(new))


def has_rest(new: Any, old: Any) -> Any:
    """Return whether `find_rest` has something, as a count."""
    return jnp.any(find_rest(new, old) != 0).astype(jnp.int32)


def _check_no_callback(function: str, program: Any) -> None:
    for eqn in iterate_equations(program):
        if eqn.primitive.name in _CALLBACKS:
            raise UnsupportedError(
                f"{function} calls Python while it runs, in {_compat.find_source(eqn)}: "
                f"{eqn.primitive.name}.\n\n"
                "A worker has the compiled program of a function, and none of its Python code.\n\n"
                "Return the value and look at coordinator.fetch(result); or leave out "
                "jax.debug.print, jax.debug.callback, jax.pure_callback and io_callback."
            )


def _is_zero(slot: Any) -> bool:
    """Whether an input is a port without a value: all but rows, and the index of the worker."""
    return isinstance(slot, Port) and not isinstance(slot.role, RowRead | WorkerIndex)


def _is_of_variable(slot: Any) -> bool:
    """Whether an input is a variable of the servers, or rows of one."""
    return isinstance(slot, ServerVariable) or (
        isinstance(slot, Port) and isinstance(slot.role, RowRead)
    )
