"""Traces a call of a Python function as a whole, to run elsewhere."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdist._called import called, name_call
from jaxdist._program.arguments.arguments import check_call, check_no_arrays_hidden, flatten
from jaxdist._program.arguments.exact import exact_structure
from jaxdist._program.arguments.opaque import check_step_holds_no_arrays
from jaxdist._program.functions.draws import (
    FunctionCall,
    serve,
    shapes_of,
    take_iterators_out,
)
from jaxdist._program.functions.function import Function
from jaxdist._program.functions.trace import FunctionTrace, trace_function
from jaxdist._program.nnx.graph import GraphCache


@dataclasses.dataclass(frozen=True)
class WholeCall(FunctionCall):
    """A call before its trace: the arguments by kind."""

    caller: str
    fn: Callable[..., Any]

    @property
    def arguments(self) -> list[Any]:
        """The arguments that are arrays or numbers."""
        return self.flat.dynamic

    def key(self) -> Any:
        """Return what decides which program the call runs, without its batches. Hashable."""
        flat = self.flat
        structure = exact_structure(flat.treedef)
        shapes = shapes_of(flat.dynamic)[1]
        return flat.treedef, structure, flat.slots, self.shape, shapes

    @called(lambda self: self.caller)
    def trace(
        self,
        state: Sequence[Any],
        replace_in: Callable[[Any], contextlib.AbstractContextManager[None]],
        read: Callable[[Any], Any],
    ) -> FunctionTrace:
        """Trace the function.

        Args:
            state: A value for each leaf of the variables of its NNX objects.
            replace_in: Replaces attributes of the NNX objects while the function runs.
            read: Maps each leaf of the function's result to the value to return.
        """
        check_no_arrays_hidden(self.flat)
        check_step_holds_no_arrays(self.fn)
        with serve(self.draws):
            return trace_function(
                self.fn, self, self.draws, list(state), self.flat.dynamic, replace_in, read
            )


class WholeCalls:
    """Reads calls of one caller. Models that were passed before are not listed again."""

    def __init__(self) -> None:
        self._caller = name_call()
        self._graphs = GraphCache()

    @called(lambda self: self._caller)
    def read(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> WholeCall:
        """Return a call of a function, or of a `jaxdist.function`.

        Raises:
            ArgumentTypeError: An argument cannot be part of a program.
        """
        if isinstance(fn, Function):
            flat = flatten(args, dict(kwargs), *fn.static_arguments)
            fn = fn.python_function
        else:
            flat = flatten(args, dict(kwargs))
        check_call(flat, args, dict(kwargs))
        flat, draws = take_iterators_out(getattr(fn, "__name__", "function"), flat)
        return WholeCall(flat, self._graphs.of(flat), draws, self._caller, fn)
