"""Plans a step for TPUs or GPUs that this machine does not have."""

import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

from jaxdist import _compat, _replica
from jaxdist._called import called, refuse
from jaxdist._collectives import Communication
from jaxdist._planning import memory_advice
from jaxdist._planning.abstract_call import count_rows_per_replica, make_abstract_call
from jaxdist._planning.needs import Needs, compile_needs, compile_or_get_refusal, read_needs
from jaxdist._planning.slice_axes import Axes, Target
from jaxdist._planning.targets import make_single_device_target, make_target
from jaxdist._program import (
    CompiledProgram,
    Program,
    RunOptions,
    check_can_be_saved,
    check_path,
    format_options,
    list_divided_work,
)
from jaxdist._reports import SlicePlan, plural, seconds, share, size
from jaxdist._strategies import Strategy
from jaxdist._validate import as_flag, as_integer

P = ParamSpec("P")
T = TypeVar("T")

# Note [A plan lowers the step again]
# A plan does not translate the program that was lowered for this machine. It lowers the same
# function again, for a strategy on the described machine, and compiles it with the compiler of
# libtpu or of JAX's CUDA plugin.
# So the plan describes the program that `run` would execute there. Arguments are shapes, from the
# signature of the first program (`make_abstract_call`), or from a task (`jobs.Task.lower`).
# Per-replica arguments have the rows of the new replicas, and `Sharded` ones are divided again.

# Lowers a step for a strategy. The number is the rows of a batch for each replica.
Lower = Callable[[Strategy, "int | None"], Program]
# Receives a line of text about the current work.
Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Source:
    """A step that can be lowered for any strategy.

    Args:
        lower: Lowers the step.
        rows: The rows of a batch for each replica; None if no input is per-replica.
        rules: The name of the rules that place its state.
        axes: The axes of the mesh of the plan.
        communication: How the replicas of the plan communicate.
    """

    lower: Lower
    rows: int | None
    rules: str = ""
    axes: Axes | None = None
    communication: Communication | None = None


@called("compile_for")
def plan(
    source: Source,
    topology: Any,
    logical: Any,
    *,
    global_batch: int | None = None,
    quick: bool = False,
    save: str | os.PathLike[str] | None = None,
    report: Report = lambda what: None,
) -> SlicePlan:
    """Compile a step for a slice, and for one device as a comparison; see `Program.compile_for`."""
    as_flag("quick", quick)
    file = None if save is None else check_path("save", save)
    # This may be called in the scope of another strategy, which the step must not see.
    with _replica.enter_frame(None):
        report(f"describing {topology}")
        target = make_target(topology, logical, source.axes, source.communication)
        rows = _get_rows(source, target, global_batch)
        return _plan_for_target(source, target, rows, quick, file, report)


def compile_for(
    strategy: Strategy,
    fn: Callable[..., Any],
    options: RunOptions | None,
    program: Program,
    topology: Any,
    *,
    logical: Any,
    global_batch: int | None,
    quick: bool,
    save: str | os.PathLike[str] | None,
) -> SlicePlan:
    """Plan a program that `strategy.lower(fn, ...)` returned; see `Program.compile_for`."""

    def lower(target: Strategy, rows: int | None) -> Program:
        # See Note [A plan lowers the step again].
        args, kwargs = make_abstract_call(program, target.layout, rows)
        return target.lower(fn, args, kwargs, options)

    axes = Axes.from_layout(strategy.layout)
    rows = count_rows_per_replica(program)
    source = Source(lower, rows, axes=axes, communication=strategy.communication)
    wanted = strategy.layout.num_logical if logical is None else logical
    return plan(source, topology, wanted, global_batch=global_batch, quick=quick, save=save)


def _plan_for_target(
    source: Source,
    target: Target,
    rows: int | None,
    quick: bool,
    file: pathlib.Path | None,
    report: Report,
) -> SlicePlan:
    report(f"tracing for {target.name}")
    program = source.lower(target.strategy, rows)
    if file is not None:
        check_can_be_saved(program.name, program.traced.closed, program.layout)
    on_one = None
    if not quick:
        one_device = make_single_device_target(target, source.axes, source.communication)
        on_one = source.lower(one_device.strategy, rows), one_device.device
    more = "" if quick else ", and for one device to compare with"
    report(f"compiling for {target.name}{more}; minutes where arrays are large")
    # XLA releases the GIL and compiles on one core, so compile both programs at the same time.
    compiling = _start_thread(compile_or_get_refusal, program)
    single = None if on_one is None else _start_thread(compile_needs, *on_one)
    try:
        compiled = compiling.result()
        needs = read_needs(program, target.device, compiled)
        saved = _save(compiled, needs, file)
    except Exception:
        _wait_for(single)
        raise
    one = None
    # If the step does not fit, the plan has advice instead of an efficiency.
    if single is not None and needs.memory.fits:
        report("compiling for one device, to compare with")
        one = single.result()
    made = SlicePlan(
        name=program.name,
        topology=target.name,
        chip=target.chip,
        devices_per_chip=target.devices_per_chip,
        num_slices=target.num_slices,
        places=target.places,
        rules=source.rules,
        rows_per_replica=rows,
        memory=needs.memory,
        flops=needs.flops,
        hbm_traffic=needs.hbm_traffic,
        traffic=needs.traffic,
        times=needs.times,
        expected=needs.expected,
        notes=(*_collect_notes(target, needs, program), *saved),
        gaps=_collect_gaps(needs),
        work=list_divided_work(program.told),
    )
    if not made.memory.fits:
        tried = None if quick else functools.partial(_compile_needs, source, target)
        found = memory_advice.make_advice(made, needs, tried, report)
        _wait_for(single)
        return dataclasses.replace(made, advice=found)
    return made if one is None else _add_efficiency(made, one)


def _save(
    compiled: CompiledProgram | str, needs: Needs, file: pathlib.Path | None
) -> tuple[str, ...]:
    """Save a compiled program if a file is given, and return a note about it for the plan."""
    if file is None:
        return ()
    if isinstance(compiled, str) or not needs.memory.fits:
        return (f"Not saved to {file}: the program does not fit.",)
    compiled.save(file)
    return (f"Saved to {file}: run the step with RunOptions(saved_program={str(file)!r}).",)


def _add_efficiency(made: SlicePlan, one: Needs) -> SlicePlan:
    """Return the plan with its efficiency: throughput per device relative to one device alone."""
    if one.times is None or made.times is None:
        note = "the step does not fit on one device"
        return dataclasses.replace(made, efficiency_note=note)
    # Both have equal rows: on one device, and on all logical devices of a replica.
    efficiency = one.times.predicted / (made.times.predicted * made.num_logical)
    note = f"of one device with the same rows, predicted {seconds(one.times.predicted)}"
    return dataclasses.replace(made, efficiency=efficiency, efficiency_note=note)


def _compile_needs(source: Source, target: Target, rows: int) -> Needs:
    return _start_thread(compile_needs, source.lower(target.strategy, rows), target.device).result()


def _get_rows(source: Source, target: Target, global_batch: int | None) -> int | None:
    # By default each replica keeps its rows, so a larger slice has a larger global batch.
    if global_batch is None:
        return source.rows
    count = target.strategy.num_replicas_in_sync
    most = (1 << 31) - 1
    global_batch = as_integer("global_batch", global_batch, least=1, most=most, example=count)
    if source.rows is None:
        raise refuse(
            f"global_batch={global_batch}, and the step has no per-replica input.",
            "The replicas share the rows of a batch, and no argument is per-replica.",
            "Leave global_batch out.",
        )
    if global_batch < count or global_batch % count:
        below, above = global_batch - global_batch % count, global_batch + -global_batch % count
        near = sorted({max(count, below), max(count, above)})
        raise refuse(
            f"global_batch={global_batch}, and {target.name} has {count} replicas.",
            "Each replica takes the same number of rows, one or more.",
            f"Use {' or '.join(map(str, near))}.",
        )
    return global_batch // count


def _collect_notes(target: Target, needs: Needs, program: Program) -> tuple[str, ...]:
    notes = []
    if program.asked_options:
        notes.append(f"Compiled with {format_options(program.asked_options)}.")
    for kind, (runs, more) in needs.enlarged.items():
        notes.append(
            f"The compiler replaced {kind}s of the step with {plural(runs, 'all-reduce')}: "
            f"a device sends {size(more)} more."
        )
    if target.chip.devices < target.devices_per_chip:
        notes.append(
            f"libtpu describes a chip of {target.chip.name} as {target.devices_per_chip} devices; "
            "on most TPU VMs JAX runs it as one."
        )
    if target.chip.platform == "gpu":
        held = needs.memory.limit / needs.memory.capacity
        notes.append(
            f"Memory is compared with {share(held)} of the GPU's, which is what JAX allocates at "
            "its start (XLA_PYTHON_CLIENT_MEM_FRACTION). XLA's figure leaves out the workspace of "
            "cuDNN and cuBLAS, the buffers of NCCL and the CUDA context, which are in the rest."
        )
    return tuple(notes)


def _collect_gaps(needs: Needs) -> tuple[str, ...]:
    """Return notes on the parts of the compiled program that were not understood."""
    gaps = []
    if needs.unknown_loops:
        loops = plural(needs.unknown_loops, "loop")
        gaps.append(
            f"{loops} with an unknown number of iterations: work and bytes of one iteration count."
        )
    if needs.unknown:
        gaps.append(
            f"operations of {', '.join(needs.unknown)}: their number is unknown, so they do not "
            "count."
        )
    return tuple(gaps)


def _wait_for(single: "Future[Any] | None") -> None:
    """Wait for a compilation whose result is not needed."""
    # Python cannot end while XLA compiles on a thread: the process would abort.
    if single is not None:
        wait([single])


def _start_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
    """Call a function on a daemon thread, and return a future of its result."""
    # XLA compiles for minutes, and nothing can interrupt it. Ctrl-C can interrupt the wait for a
    # future. Python does not join a daemon thread at exit, but it joins those of an executor.
    future: Future[T] = Future()
    settings = _compat.ThreadSettings()

    def work() -> None:
        try:
            with settings.use():
                result = function(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="jaxdist compiles", daemon=True).start()
    return future
