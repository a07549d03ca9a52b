"""The programs of one function under one strategy."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist import _compat
from jaxdist._collectives import is_below_a_byte
from jaxdist._program.arguments.arguments import check_no_arrays_hidden
from jaxdist._program.arguments.opaque import check_step_holds_no_arrays
from jaxdist._program.arguments.retrace import RetraceWatch, place
from jaxdist._program.compile.build import build
from jaxdist._program.compile.program import Program
from jaxdist._program.proof.uneven_mean import warn_of_means
from jaxdist._program.run.ahead import LaterSteps, check_can_be_uneven, later_steps, note
from jaxdist._program.run.call import Call
from jaxdist._program.run.difference import difference
from jaxdist._program.run.donated import check_numbers, donated_leaves
from jaxdist._program.state.no_rows import rows_of
from jaxdist._program.trace.trace import Signature
from jaxdist._program.variables.lift import NO_VARIABLES


@dataclasses.dataclass
class Ready:
    """A program with its executable, and what the C++ call path needs (made at the first call)."""

    program: Program
    compiled: jax.stages.Compiled
    record: Any = None
    has_record: bool = False

    @functools.cached_property
    def _has_parts_of_bytes(self) -> bool:
        dtypes = (slot.dtype for slot in self.program.signature.inputs)
        return not _compat.LAYOUTS_BELOW_A_BYTE_AGREE and any(
            isinstance(dtype, np.dtype) and is_below_a_byte(dtype) for dtype in dtypes
        )

    def call(self, leaves: Sequence[Any]) -> Any:
        """Flat results."""
        if self._has_parts_of_bytes:
            return _compat.call_with_any_layout(self.compiled, leaves)
        return self.compiled(*leaves)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Flat results, and from then on a record for the C++ call path."""
        results = self.call(leaves)
        if not self.has_record and not self._has_parts_of_bytes:
            self.record = _compat.fast_call_record(
                self.compiled, len(leaves), results, self.program.template
            )
            self.has_record = True
        return results


class Programs:
    """Traces and compiles a function, once for each signature of its calls.

    The function and the strategy are asked for when they are needed: neither is kept alive.
    """

    def __init__(
        self,
        fn: Callable[[], Any],
        strategy: Callable[[], Any],
        donated: tuple[int, ...],
        watch: RetraceWatch,
    ) -> None:
        self._fn = fn
        self._strategy = strategy
        self._donated = donated
        self._watch = watch
        self._ready: dict[Signature, Ready] = {}
        # While JAX looks for numbers that are none.
        self._undonated: dict[Signature, Ready] = {}
        # Whether it was said that replicas with different numbers of rows take a mean.
        self._means_told = False
        # Traced by `traced` or `look_ahead` and not compiled yet.
        self._only_traced: dict[Signature, Program] = {}
        self._looked_ahead: set[LaterSteps] = set()
        # The variables that the last program touched; the next one probably does as well.
        self._variables = NO_VARIABLES

    def get(self, signature: Signature) -> Ready | None:
        """The compiled program for this signature, if there is one."""
        return self._ready.get(signature)

    def ready(self, call: Call) -> Ready:
        """The compiled program of a call, made at the first one."""
        known = self._ready.get(call.signature)
        return self._new(call) if known is None else known

    def without_donation(self, call: Call) -> Ready:
        """The same program, which leaves its arguments as they are."""
        known = self._undonated.get(call.signature)
        if known is None:
            program = self._ready[call.signature].program if call.signature in self._ready else None
            whole = program or self._only_traced.get(call.signature) or self.build(call)
            self.look_ahead(call)
            kept = dataclasses.replace(whole, donated=())
            known = self._undonated[call.signature] = Ready(kept, kept.compiled())
        return known

    def traced(self, call: Call) -> Program:
        """The program of a call, without compiling it."""
        ready = self._ready.get(call.signature)
        if ready is not None:
            return ready.program
        known = self._only_traced.get(call.signature)
        if known is not None:
            return known
        program = self.build(call)
        if not call.is_traced:
            self._only_traced[call.signature] = program
        return program

    def build(self, call: Call) -> Program:
        """Trace and analyse a call; nothing is kept."""
        fn = self._fn()
        flat, signature = call.flat, call.signature
        check_numbers(self._donated, flat.given[0])
        check_no_arrays_hidden("strategy.run", flat)
        check_step_holds_no_arrays("strategy.run", fn)
        program = build(
            fn,
            signature,
            self._strategy(),
            flat.names(),
            self._donated,
            donated_leaves(self._donated, flat, signature.graph),
            place(fn),
            self._variables,
        )
        if program.variables:
            self._variables = program.variables
        if program.traced.means and not self._means_told:
            self._means_told = True
            rows = rows_of(signature, program.layout.num_replicas)
            warn_of_means(place(fn), program.traced.means, rows, signature.step)
        return program

    def look_ahead(self, call: Call) -> None:
        """Trace the step for the uneven batches that its data has yet to give.

        See Note [Batches to come]. Where nobody else traces, the traces are kept for the calls
        with these batches.

        Raises:
            Exception: What tracing raises, with a note that says of which batch.
        """
        layout = self._strategy().layout
        later = later_steps(call, layout)
        if later is None or later in self._looked_ahead:
            return
        for step, signature in later.signatures(call, layout):
            if signature in self._ready or signature in self._only_traced:
                continue
            try:
                check_can_be_uneven(signature, call.flat.names(), layout)
                program = self.build(dataclasses.replace(call, signature=signature))
            except Exception as error:
                error.add_note(note(step))
                raise
            if not call.is_traced:
                self._only_traced[signature] = program
        self._looked_ahead.add(later)

    def _new(self, call: Call) -> Ready:
        fn, signature = self._fn(), call.signature
        program = self._only_traced.pop(signature, None) or self.build(call)
        self.look_ahead(call)
        if self._ready:
            last = next(reversed(self._ready))
            changed = difference(last, signature, call.flat.names())
            self._watch.new_program(fn, len(self._ready) + 1, changed)
        else:
            self._watch.new_function(fn)
        ready = self._ready[signature] = Ready(program, program.compiled())
        return ready
