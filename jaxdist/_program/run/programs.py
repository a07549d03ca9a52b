"""Caches the programs of one function under one strategy, by signature."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._collectives import collect_notes, is_below_a_byte
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.arguments import Flat, check_no_arrays_hidden, check_no_refs
from jaxdist._program.arguments.compiler_options import as_compiler_options, format_options
from jaxdist._program.arguments.opaque import check_step_holds_no_arrays
from jaxdist._program.arguments.options import RunOptions
from jaxdist._program.arguments.retrace import RetraceWatch, source_location
from jaxdist._program.compile import saving
from jaxdist._program.compile.build import build
from jaxdist._program.compile.program import Program
from jaxdist._program.compile.same_program import check_same_program
from jaxdist._program.proof.uneven_mean import MeanOverReplicas, warn_of_means
from jaxdist._program.run.ahead import (
    LaterSteps,
    check_can_be_uneven,
    describe_later_step,
    find_later_steps,
)
from jaxdist._program.run.call import Call
from jaxdist._program.run.donation import check_positions, find_donated_leaves
from jaxdist._program.run.whole_batches import describe_whole_beside_split
from jaxdist._program.state.no_rows import rows_of
from jaxdist._program.trace.layouts import describe_left_out
from jaxdist._program.trace.trace import Signature
from jaxdist._program.variables.lift import NO_VARIABLES, lift
from jaxdist._values import Kind, view_on
from jaxdist.errors import JaxdistError, SavedProgramError

_LOG = logging.getLogger("jaxdist")


@dataclasses.dataclass
class ReadyProgram:
    """A program with its executable, and the record for the C++ call path (made at first call)."""

    program: Program
    compiled: jax.stages.Compiled
    record: Any = None
    has_record: bool = False

    @functools.cached_property
    def _has_subbyte_inputs(self) -> bool:
        # On such JAX versions the compiled call refuses the layouts of 4-bit arrays.
        dtypes = (slot.dtype for slot in self.program.signature.inputs)
        return not _compat.SUPPORTS_SUB_BYTE_LAYOUTS and any(
            isinstance(dtype, np.dtype) and is_below_a_byte(dtype) for dtype in dtypes
        )

    def call(self, leaves: Sequence[Any]) -> Any:
        """Run the executable and return flat results."""
        if self._has_subbyte_inputs:
            results = _compat.call_without_layout_checks(self.compiled, leaves)
        else:
            results = self.compiled(*leaves)
        # Results whose sharding XLA has chosen must be on the mesh of the strategy.
        layout, shardings = self.program.layout, self.program.result_shardings
        if not layout.has_explicit_axes or None not in shardings:
            return results
        return [
            view_on(x, NamedSharding(layout.mesh, x.sharding.spec)) if s is None else x
            for x, s in zip(results, shardings, strict=True)
        ]

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run the executable, make the record for the C++ call path, and return flat results."""
        results = self.call(leaves)
        if not self.has_record and not self._has_subbyte_inputs:
            self.record = _compat.fast_call_record(
                self.compiled, len(leaves), results, self.program.template
            )
            self.has_record = True
        return results


class Programs:
    """Traces and compiles a function once for each signature of its calls.

    It holds callables that return the function and the strategy, to keep neither of them alive.
    """

    def __init__(
        self,
        fn: Callable[[], Any],
        strategy: Callable[[], Any],
        options: RunOptions,
        watch: RetraceWatch,
    ) -> None:
        self._fn = fn
        self._strategy = strategy
        self._donated = options.donate_argnums
        self.compiler_options = as_compiler_options(options.compiler_options)
        path = options.saved_program
        self.saved_program = None if path is None else pathlib.Path(path)
        self._watch = watch
        # The compiled programs.
        self.ready: dict[Signature, ReadyProgram] = {}
        # Programs without donation, which run while JAX checks for nan and inf.
        self._undonated: dict[Signature, ReadyProgram] = {}
        # Whether steps were op by op for which `warn_of_means` has warned.
        self._warned_of_means: set[bool] = set()
        # Whether it was logged that `sharded_update` gets equal gradients.
        self._has_logged_gradients = False
        # Layouts without effect that were logged.
        self._logged_layouts: frozenset[str] = frozenset()
        # Programs that `find_or_trace` or `look_ahead` traced and that are not compiled yet.
        self._only_traced: dict[Signature, Program] = {}
        self._looked_ahead: set[LaterSteps] = set()
        # The variables of the last program. The next program probably uses the same ones.
        self._variables = NO_VARIABLES

    @called("strategy.run")
    def find_or_trace(self, call: Call) -> Program:
        """Return the program of a call without compiling it; trace and analyse it if it is new."""
        flat, signature = call.flat, call.signature
        ready = self.ready.get(signature)
        known = self._only_traced.get(signature) if ready is None else ready.program
        if known is not None:
            return known
        fn, strategy = self._fn(), self._strategy()
        check_positions(self._donated, flat.given[0])
        check_no_arrays_hidden(flat)
        check_no_refs(flat)
        check_step_holds_no_arrays(fn)
        with collect_notes() as notes, self._explain_rows(flat, signature):
            lifted = lift(fn, signature, strategy, self._variables)
        program = build(
            getattr(fn, "__name__", type(fn).__name__),
            *lifted,
            strategy.layout,
            flat.names(),
            self._donated,
            find_donated_leaves(self._donated, flat, signature.graph),
            source_location(fn),
            notes,
            self.compiler_options,
        )
        if program.variables:
            self._variables = program.variables
        self.warn_of_means(signature, lambda: program.traced.means, op_by_op=False)
        self._log_layouts(program)
        self._log_equal_gradients(program)
        # Inside another trace the program contains tracers, which die with that trace.
        if not call.is_traced:
            self._only_traced[signature] = program
        return program

    @contextlib.contextmanager
    def _explain_rows(self, flat: Flat, signature: Signature) -> Iterator[None]:
        """Add a note to an error about shapes where one argument is split and another is not."""
        try:
            yield
        except (TypeError, ValueError) as error:
            if not isinstance(error, JaxdistError):
                count = self._strategy().layout.num_replicas
                note = describe_whole_beside_split(self._fn(), signature, flat.names(), count)
                if note is not None:
                    error.add_note(note)
            raise

    def warn_of_means(
        self,
        signature: Signature,
        find_means: Callable[[], Sequence[MeanOverReplicas]],
        *,
        op_by_op: bool,
    ) -> None:
        """Warn, once compiled and once op by op, of a mean over replicas with unequal rows."""
        means = () if op_by_op in self._warned_of_means else find_means()
        if means:
            self._warned_of_means.add(op_by_op)
            rows = rows_of(signature, self._strategy().layout.num_replicas)
            warn_of_means(source_location(self._fn()), means, rows, signature.step)

    def _log_layouts(self, program: Program) -> None:
        """Log layouts that have no effect, once for each place in the step."""
        layout, lines = program.layout, frozenset(program.traced.left_out)
        if _is_first_process(layout) and not lines <= self._logged_layouts:
            self._logged_layouts |= lines
            _LOG.info("%s", describe_left_out(program.name, program.traced.left_out, layout))

    def _log_equal_gradients(self, program: Program) -> None:
        """Log once that `sharded_update` gets gradients which are reduced already."""
        if self._has_logged_gradients or not _is_first_process(program.layout):
            return
        # A single gradient may be equal for another reason, like that of a frozen parameter. In a
        # step in which nothing differs between the replicas, all of them compute the same rows.
        of_updates = [c for c in program.traced_collectives if c.is_of_update]
        has_rows = any(slot.kind is Kind.PER_REPLICA for slot in program.signature.inputs)
        if has_rows and of_updates and all(c.scatters_equal for c in of_updates):
            self._has_logged_gradients = True
            _LOG.warning(
                "strategy.run(%s): all gradients that sharded_update gets at %s are already the "
                "same on all replicas. It reduces gradients itself, so they are reduced twice: "
                "each device sends twice the bytes, and with reduce_op='sum' the result is "
                "%s times too large. Pass each replica's own gradients",
                program.name,
                of_updates[0].source,
                program.layout.num_replicas,
            )

    def look_ahead(self, call: Call) -> None:
        """Trace the step for the uneven batches that its data will still produce.

        See Note [Batches to come]. Outside of other traces, the programs are cached for the calls
        with these batches.

        Raises:
            Exception: Any error of the trace, with a note about the batch.
        """
        layout = self._strategy().layout
        later = find_later_steps(call, layout)
        if later is None or later in self._looked_ahead:
            return
        for step, signature in later.signatures(call, layout):
            if signature in self.ready or signature in self._only_traced:
                continue
            try:
                check_can_be_uneven(signature, call.flat.names(), layout)
                self.find_or_trace(dataclasses.replace(call, signature=signature))
            except Exception as error:
                error.add_note(describe_later_step(step))
                raise
        self._looked_ahead.add(later)

    def compile(self, call: Call, program: Program, *, donates: bool) -> ReadyProgram:
        """Compile the program of a call, and keep it for calls of the same signature.

        Args:
            call: The call.
            program: Its program, as `find_or_trace` returned it.
            donates: Whether to compile the donation of its arguments, too.
        """
        fn, signature = self._fn(), call.signature
        known = None if donates else self._undonated.get(signature)
        if known is not None:
            return known
        self.look_ahead(call)
        if not donates:
            kept = dataclasses.replace(program, donated=())
            ready = self._undonated[signature] = ReadyProgram(kept, self._compile(kept, None))
            return ready
        self._only_traced.pop(signature, None)
        # Before the first run: an error about a later batch must come before hours of training.
        if self.ready:
            last = next(reversed(self.ready))
            changed = describe_difference(last, signature, call.flat.names())
            self._watch.count_program(fn, len(self.ready) + 1, changed)
        else:
            self._watch.count_function(fn)
        compiled = self._compile(program, self.saved_program)
        ready = self.ready[signature] = ReadyProgram(program, compiled)
        return ready

    def _compile(self, program: Program, path: pathlib.Path | None) -> jax.stages.Compiled:
        saved = saving.read_saved(path)
        lowered = program.lowered()
        if program.layout.is_shared:
            strategy = self._strategy()
            seconds = strategy.communication.options.timeout_seconds
            if program.told.timeout_seconds is not None:
                strategy._limit_step(self._fn(), program.told.timeout_seconds)
            check_same_program(
                program.name,
                lowered,
                program.inputs,
                program.layout,
                seconds,
                format_options(program.asked_options),
                saving.describe_saved(saved),
            )
        if isinstance(saved, SavedProgramError):
            raise saved
        loaded = None
        if saved is not None:
            loaded = saved.load(program._identify(lowered), is_first=not self.ready)
        return program.compiled(lowered) if loaded is None else loaded


def _is_first_process(layout: ReplicaMesh) -> bool:
    """Whether this process logs for all processes, which run the same program."""
    return bool(layout.process.index == min(layout.device_owners.values()))


def describe_difference(before: Signature, now: Signature, names: Sequence[str]) -> str:
    """Describe how two signatures differ."""
    if (before.treedef, before.structure) != (now.treedef, now.structure):
        return "the structure of its arguments"
    if before.slots != now.slots:
        pairs = zip(before.slots, now.slots, strict=False)
        changed = [f"{a!r} -> {b!r}" for a, b in pairs if a != b]
        return f"a Python value that is part of the program: {', '.join(changed[:3])}"
    if before.settings != now.settings:
        return "a setting of JAX, such as jax_enable_x64"
    if before.graph != now.graph:
        return "the structure or a static attribute of an NNX object"
    offset = len(now.inputs) - len(names)
    changed = []
    for i, (a, b) in enumerate(zip(before.inputs, now.inputs, strict=True)):
        if a != b:
            name = names[i - offset] if i >= offset else f"NNX variable {i}"
            changed.append(
                f"{name}: {a.kind.value} {a.dtype}{list(a.shape)} -> "
                f"{b.kind.value} {b.dtype}{list(b.shape)}"
            )
    return ", ".join(itertools.islice(changed, 3)) or "nothing that can be named"
