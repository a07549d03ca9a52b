"""One function under one strategy: its fast call path and its slow one.

# Note [Call paths]
The slow path (`Step.slow`) reads every leaf of a call, builds or finds the program, and runs it. It
then gives JAX's C++ dispatcher a record, so that equal calls need no Python of this room. A
signature that the dispatcher does not know is a miss, and takes the slow path.

Some calls need more than the dispatcher does: copies of NumPy arrays, checks for deleted buffers,
a limit of the steps in flight, and so on. `Step._call_prepared` does this before it calls the
dispatcher. Each need is noted when the slow path first meets a call that has it. The calls of steps
without any go to the dispatcher itself.

Static arguments, NNX objects and variables are not leaves for the dispatcher. `FastCall` takes them
out of the arguments first.
"""

import weakref
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import jax

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._devices import CPU_STEPS
from jaxdist._integers import has_unfit, list_host_arrays
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import op_by_op as executor
from jaxdist._program import virtual
from jaxdist._program.arguments.arguments import (
    Static,
    check_call,
    check_no_arrays_hidden,
    check_no_refs,
    flatten,
)
from jaxdist._program.arguments.compiler_options import (
    IN_JIT,
    OP_BY_OP,
    log_options_without_effect,
    request_options,
)
from jaxdist._program.arguments.exact import dispatch_by_structure
from jaxdist._program.arguments.options import RunOptions, find_static_numbers
from jaxdist._program.arguments.retrace import RetraceWatch, source_location
from jaxdist._program.compile.program import Program
from jaxdist._program.nnx.graph import GraphCache
from jaxdist._program.run.call import Call, find_mesh_of_trace, read, run_inside_trace
from jaxdist._program.run.call_paths import (
    MirrorCache,
    has_host_arrays,
    is_elsewhere,
    must_count,
)
from jaxdist._program.run.donation import (
    BufferCheck,
    check_deleted,
    check_not_repeated,
    check_positions,
    has_repeats,
    may_crash,
)
from jaxdist._program.run.fast_call import CallTemplate, FastCall, NotCompiled, TakeSlowPath
from jaxdist._program.run.programs import Programs
from jaxdist._program.run.same_arguments import make_arguments_equal
from jaxdist._program.run.whole_batches import WholeBatches, find_in_program
from jaxdist._program.variables.lift import LiftedVariables
from jaxdist._replica import HasLayout
from jaxdist._values import as_held, check_alive, copy_writable_leaves, has_padding, list_arrays


class Step:
    """Runs one function. `call` is the current call path; see Note [Call paths]."""

    @called("RunOptions")
    def __init__(
        self,
        fn: Callable[..., Any],
        options: RunOptions,
        strategy: HasLayout,
        watch: RetraceWatch,
    ) -> None:
        # Weakly where it is possible: the runner drops this object when the function dies.
        self._fn = weakref.ref(fn) if type(fn).__name__ == "function" else (lambda: fn)
        self._strategy = weakref.ref(strategy)
        self._layout: ReplicaMesh = strategy.layout
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.donated = options.donate_argnums
        self._static_names = frozenset(options.static_argnames)
        self._static_numbers = find_static_numbers(fn, options.static_argnames)
        self._programs = Programs(self._fn, self._strategy, options, watch)
        self._whole_batches = WholeBatches(self._fn, self._layout)
        self._graphs = GraphCache()
        self._fast_calls: dict[tuple[CallTemplate, int], FastCall] = {}
        # Plain attributes, because `FastCall` reads them at every call.
        self.find_graph = self._graphs.current
        self.donates = bool(self.donated)
        # Whether steps in flight must be counted.
        self.counts_steps = False
        # Whether structures that JAX considers equal must be told apart.
        self.tells_structures_apart = False
        # Whether NumPy arrays must be copied first.
        self.copies_host_arrays = False
        # Whether padded arrays must pass JAX's call path with their padding.
        self.keeps_padding = False
        # Whether calls check for deleted buffers, because JAX would check too late.
        self.finds_deleted = self.donates and may_crash(self._layout)
        # Whether uncommitted arrays are copied to all devices only once.
        self.mirrors = False
        self._mirror = MirrorCache(self._layout)
        # On one device XLA refuses repeated buffers without ending the process.
        self._checks_buffers = len(self._layout.devices) > 1
        self._buffers = BufferCheck(finds_deleted=self.finds_deleted)
        self._is_new = True
        self._dispatcher = self._new_dispatcher()
        self.direct: Callable[..., Any] = self._call_prepared
        self.call: Callable[..., Any] = self.direct
        if options.static_argnames:
            self.call = self.slow

    # The fast path: the dispatcher, and what calls need around it.

    def _call_prepared(self, *args: Any, **kwargs: Any) -> Any:
        """Call the dispatcher, with all that the earlier calls needed; see Note [Call paths]."""
        if self._is_new:
            # JAX's call path would remove the padding.
            self.keeps_padding = has_padding((args, kwargs))
            # Last: another thread that finds it False skips the line above.
            self._is_new = False
            self._renew_direct()
        prepared = self.prepare(args, kwargs)
        if prepared is None:
            return self.slow(*args, **kwargs)
        args, kwargs = prepared
        # Before the checks: while this thread waits, others may donate the same arrays.
        if self.counts_steps:
            CPU_STEPS.make_room()
        if self.donates:
            # Under jax_debug_nans only the slow path runs the program that donates nothing.
            needs_slow_path = _compat.is_checking_numbers() or (
                self._checks_buffers and self._buffers.needs_slow_path(args, kwargs)
            )
        else:
            needs_slow_path = self.finds_deleted and _compat.has_deleted(
                jax.tree.leaves((args, kwargs))
            )
        if needs_slow_path:
            return self.slow(*args, **kwargs)
        own = args, kwargs
        # Only now: above are the caller's own arrays, one of which may be passed twice.
        if self.mirrors:
            args, kwargs = self.mirrored(args, kwargs, self.donated)
        try:
            results = self._dispatcher(*args, **kwargs)
        except ValueError as error:
            if not self.donates or "donate" not in str(error) or not has_repeats(own):
                raise
            return self.slow(*own[0], **own[1])
        if self.counts_steps:
            CPU_STEPS.count_step(results, list_arrays)
        return results

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments for the dispatcher; None if the slow path must take the call."""
        if self.keeps_padding:
            # JAX flattens the arguments and would slice the padding off: a copy at every call.
            args, kwargs = as_held((args, kwargs))
        if self.copies_host_arrays:
            host = list_host_arrays((args, kwargs))
            # The slow path raises if JAX would truncate integers.
            if has_unfit(host):
                return None
            if host:
                args, kwargs = copy_writable_leaves((args, kwargs))
        return args, kwargs

    def mirrored(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], donated: Collection[int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the cached copies of arrays that are on one device.

        The first call without such arrays ends this. From then on the arguments are usually
        results of the step, which are mirrored already.
        """
        copied = self._mirror.replace_arguments(args, kwargs, donated)
        if copied is None:
            self.keep_copies(False)
            return args, kwargs
        return copied

    # The slow path: read every leaf, find or build the program, run it.

    def slow(self, *args: Any, **kwargs: Any) -> Any:
        """Run without the C++ dispatcher."""
        return self._miss(*args, **kwargs)[0]

    @called("strategy.run")
    def _miss(self, *args: Any, **kwargs: Any) -> _compat.Answer:
        around = find_mesh_of_trace(self._layout)
        with _compat.use_no_mesh():
            call = self._read(args, kwargs)
            if call.is_traced:
                return _compat.answer_miss(self._inside_trace(call, around))
            self._layout.check_can_run()
            if _compat.is_jit_disabled():
                return _compat.answer_miss(self._op_by_op(call, args))
            # Now: a copy on all devices below would replace an array on one of them.
            batches = self._whole_batches.find(call)
            if any(is_elsewhere(leaf, self._layout) for leaf in call.leaves):
                self.keep_copies()
                # The copy on the array's own device has the same buffer. It would hide that one
                # buffer is passed twice.
                is_twice = self.donates and has_repeats((args, kwargs))
                copied = (
                    None if is_twice else self._mirror.replace_arguments(args, kwargs, self.donated)
                )
                if copied is not None:
                    args, kwargs = copied
                    call = self._read(args, kwargs)
            is_checked = self.donates and _compat.is_checking_numbers()
            ready = None if is_checked else self._programs.ready.get(call.signature)
            if ready is None:
                # Traced here and compiled there, so that a new step has few frames below its own.
                program = self._programs.find_or_trace(call)
                # If the result has a nan, the step runs again op by op, with the same arguments. So
                # they must not be donated.
                ready = self._programs.compile(call, program, donates=not is_checked)
                if self._layout.is_shared:
                    strategy: Any = self._strategy()
                    seconds = strategy.communication.options.timeout_seconds
                    make_arguments_equal(self.name, call, self._layout, seconds)
            program = ready.program
            self._check_same_work(call, batches, program)
            leaves = call.leaves_of(program)
            if _compat.has_deleted(leaves):
                self.check_deleted(args, kwargs)
                check_alive(program.variables.all)
            check_not_repeated(self.donated, leaves, program)
            self._buffers.register_structure(args, kwargs)
            CPU_STEPS.make_room()
            results = ready.run(leaves)
            result = call.update_state(program, results)
            if must_count(program):
                CPU_STEPS.count_step(results)
            # Only now, because the call may have failed.
            self._note_needs(call, program)
            if is_checked:
                return _compat.answer_miss(result)
            # The dispatcher can only repeat this call if its leaves are the arguments unchanged.
            plain = not call.flat.nodes and not any(isinstance(s, Static) for s in call.flat.slots)
            if program.variables or not plain:
                self._use_fast_call(call, args, kwargs, program.variables)
                return _compat.answer_miss(result)
            can_repeat = not call.moved and not call.flat.lost_padding
            return _compat.answer_miss(result, ready.record if can_repeat else None)

    def _check_same_work(self, call: Call, batches: tuple[int, ...], program: Program) -> None:
        """Log whole batches that every replica computes."""
        if batches:
            signature, traced = program.signature, program.traced
            reached = find_in_program(signature, traced, self._layout)
            self._whole_batches.check(call, batches, signature, traced, reached)

    @called("strategy.run")
    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        flat = flatten(args, kwargs, self._static_names, self._static_numbers)
        check_call(flat, args, kwargs)
        return read(flat, self._graphs.of(flat), self._layout)

    def _inside_trace(self, call: Call, around: Any) -> Any:
        virtual.check_inside_trace(self._layout)
        program = self._programs.find_or_trace(call)
        left = self._programs.compiler_options
        # `compiler_options` checks them against those that the program needs.
        options = program.compiler_options if left else {}
        chosen = {name: options[name] for name, _ in left}
        if chosen and request_options(chosen):
            left = ()
        log_options_without_effect(left, self._programs.saved_program, IN_JIT)
        self._programs.look_ahead(call)
        self._check_same_work(call, self._whole_batches.find(call), program)
        return run_inside_trace(call, program, around)

    @_compat.outside_of_meshes
    def program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """Return the program that this call would run."""
        return self._programs.find_or_trace(self._read(args, kwargs))

    # Op by op, as JAX runs operations outside of `jit`.

    @called("strategy.run")
    def op_by_op(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run without compiling, with one thread for each replica."""
        around = find_mesh_of_trace(self._layout)
        with _compat.use_no_mesh():
            call = self._read(args, kwargs)
            if call.is_traced:
                return self._inside_trace(call, around)
            self._layout.check_can_run()
            if _compat.has_deleted(call.leaves):
                self.check_deleted(args, kwargs)
            return self._op_by_op(call, args)

    @called("strategy.run")
    def _run_op_by_op(
        self, call: Call, args: tuple[Any, ...], *, warns: bool
    ) -> "executor.Outcome":
        virtual.check_compiled(self._layout)
        log_options_without_effect(
            self._programs.compiler_options, self._programs.saved_program, OP_BY_OP
        )
        fn: Any = self._fn()
        strategy: Any = self._strategy()
        check_positions(self.donated, args)
        check_no_arrays_hidden(call.flat)
        check_no_refs(call.flat)
        with _compat.enable_jit():
            step = executor.OpByOpStep(fn, call.signature, strategy, call.leaves)
            outcome = step.run(self.donated, source_location(fn))
            if warns and call.signature.uneven:
                self._programs.warn_of_means(call.signature, step.find_means, op_by_op=True)
            batches = self._whole_batches.find(call)
            if batches:
                traced, reached = step.get_trace(), step.find_same_work()
                self._whole_batches.check(call, batches, call.signature, traced, reached)
            return outcome

    @_compat.outside_of_meshes
    def find_invalid_number(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> NoReturn:
        """Run op by op to find the line that made a nan or inf. No state is assigned.

        Raises:
            NotFiniteError: Always. It shows the line if that is found.
        """
        # Not for virtual replicas: op by op, numbers are rounded differently than compiled.
        why = ""
        if self._layout.num_virtual is not None:
            why = "With deterministic=True"
        elif self._layout.is_shared:
            why = "With several processes"
        call = None if why else self._read(args, kwargs)
        if call is not None and not call.is_traced and not _compat.has_deleted(call.leaves):
            self._run_op_by_op(call, args, warns=False)
        name = f"strategy.run({self.name})"
        raise executor.not_found_error(error, name, "step", why) from error

    def _op_by_op(self, call: Call, args: tuple[Any, ...]) -> Any:
        outcome = self._run_op_by_op(call, args, warns=True)
        variables = LiftedVariables(outcome.variables, (), 0)
        # Even if the first assignment is interrupted, the variables get their new values.
        try:
            if call.cached_graph is not None:
                call.cached_graph.write(outcome.state)
        finally:
            variables.write(outcome.values)
        return outcome.result

    def check_deleted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise an error that names the arguments with deleted buffers, if there are any."""
        flat = flatten(args, kwargs, self._static_names, self._static_numbers)
        check_deleted(self.name, flat, self._graphs.of(flat), self.donated)

    def guard(self) -> None:
        """Check for deleted buffers from now on: another step of the strategy donates some."""
        self.finds_deleted = True
        self._renew_direct()

    def _note_needs(self, call: Call, program: Program) -> None:
        """Note what calls like this one need from now on."""
        self.counts_steps = self.counts_steps or must_count(program)
        self.copies_host_arrays = self.copies_host_arrays or has_host_arrays(call)
        self.keeps_padding = self.keeps_padding or call.has_padding
        # One C++ dispatcher for each exact structure; see Note [Equal constants].
        if call.signature.structure is not None and not self.tells_structures_apart:
            self.tells_structures_apart = True
            self._dispatcher = dispatch_by_structure(self._new_dispatcher)
        self._renew_direct()

    def keep_copies(self, mirrors: bool = True) -> None:
        """Start or stop the caching of copies of arrays on one device."""
        if self.mirrors is not mirrors:
            self.mirrors = mirrors
            self._renew_direct()

    def _new_dispatcher(self) -> Callable[..., Any]:
        return _compat.make_dispatcher(self.name, self._miss, copies=self.keep_copies)

    def _renew_direct(self) -> None:
        """Let calls go to the dispatcher itself, unless they need more; see Note [Call paths]."""
        needs_more = (
            self._is_new
            or self.donates
            or self.finds_deleted
            or self.mirrors
            or self.counts_steps
            or self.copies_host_arrays
            or self.keeps_padding
        )
        direct = self._call_prepared if needs_more else self._dispatcher
        # `call` may be a `FastCall` or the slow path; these stay.
        if self.call is self.direct:
            self.call = direct
        self.direct = direct

    # Calls with static arguments, NNX objects and variables.

    def _use_fast_call(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        variables: LiftedVariables,
    ) -> None:
        """Use a `FastCall` for later calls that have such arguments at the same positions."""
        template = self._make_template(call, args, kwargs)
        if template is not None:
            key = (template, id(variables))
            self.call = self._fast_calls.setdefault(key, FastCall(self, template, variables))
        elif variables:
            self.call = self.slow

    def _make_template(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallTemplate | None:
        return CallTemplate.of(call.flat, args, kwargs, self._static_numbers, self._static_names)

    def dispatcher_for(
        self, template: CallTemplate, variables: LiftedVariables, restore: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a C++ dispatcher for calls whose arguments a template took apart."""

        @_compat.outside_of_meshes
        def miss(*given: Any) -> _compat.Answer:
            args, kwargs = restore(given[2], given[3])
            call = self._read(args, kwargs)
            ready = self._programs.ready.get(call.signature)
            traced = call.flat.has_tracer or _compat.must_interpret()
            # A traced number at the position of a static value is an argument of the program, but
            # the dispatcher did not get it.
            fits = self._make_template(call, args, kwargs) == template
            if traced or call.moved or not fits or has_padding(given):
                return _compat.answer_miss(TakeSlowPath())
            if ready is None:
                return _compat.answer_miss(NotCompiled())
            if ready.program.variables is not variables:
                return _compat.answer_miss(TakeSlowPath())
            leaves = call.leaves_of(ready.program)
            check_not_repeated(self.donated, leaves, ready.program)
            self._check_same_work(call, self._whole_batches.find(call), ready.program)
            results = ready.call(leaves)
            return _compat.answer_miss(ready.program.rebuild(results), ready.record)

        return _compat.make_dispatcher(self.name, miss, copies=self.keep_copies)
