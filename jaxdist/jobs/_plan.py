"""Plans a job without its data."""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxdist._called import called
from jaxdist._planning import (
    Source,
    count_slices,
    list_logical_counts,
    make_axes,
    make_target,
    plan,
)
from jaxdist._program import format_options
from jaxdist._reports import Candidate, SlicePlan, Sweep
from jaxdist._validate import as_integer, check_callable, check_instance
from jaxdist.errors import JaxdistError
from jaxdist.jobs._config.checks import MOST_ROWS
from jaxdist.jobs._config.schema import check_choice, list_inner_axes
from jaxdist.jobs._partitions import UPDATES, find_partition
from jaxdist.jobs._task import Task

# The most devices of a replica for which a sweep tries tensor parallelism and other axes.
_MOST_LOGICAL = 16

Report = Callable[[str], None]


@called("jobs.plan_job", replaces="compile_for")
def plan_job(
    job: Task[Any],
    topology: Any,
    *,
    logical: Any = None,
    rules: str | None = None,
    global_batch: int | None = None,
    quick: bool = False,
    save: str | os.PathLike[str] | None = None,
    report: Report = lambda what: None,
) -> SlicePlan:
    """Compile the train step of a job for a TPU slice, without the TPUs, and return its plan.

    Shapes:
        A replica has the rows that the configuration gives it on the configured devices. With
        `global_batch`, it has its share of that batch.

    Cost:
        Two compilations. If the step does not fit, a few more, to find a batch that fits.

    Args:
        job: A task from `load_job`.
        topology: As for `Program.compile_for`.
        logical: The logical devices of a replica, or of each of its parts (stages, positions,
            experts): a number, or a box of chips such as `"2x2"`. None takes the configured ones.
        rules: How to place its state, one of `job.rules`; None takes the configured rules.
        global_batch: The rows of all replicas together.
        quick: As for `Program.compile_for`.
        save: As for `Program.compile_for`. Train with the file as `training.program`.
        report: Receives a line of text about the current work.

    Returns:
        The plan.

    Raises:
        ArgumentError: The job does not have these rules, or the replicas cannot share the batch
            equally.
        TopologyError: The slice does not exist, or the logical devices do not divide it.
        MissingExtraError: libtpu is not installed.

    Example:
        >>> from jaxdist.jobs import load_job, plan_job
        >>> job = load_job("configs/digits_mirrored.toml", ["model.channels=[4]"])
        >>> plan = plan_job(job, "v5e:2x2", quick=True)
        >>> plan.global_rows, plan.memory.fits
        (64, True)
    """
    _check_arguments(job, report)
    chosen = job.rules[0] if rules is None else check_choice("rules", rules, job.rules)
    wanted = job.config.strategy.logical_devices if logical is None else logical
    return plan(
        _make_source(job, chosen, wanted),
        topology,
        _count_devices(job, wanted),
        global_batch=global_batch,
        quick=quick,
        save=save,
        report=report,
    )


@called("jobs.sweep_job", replaces="compile_for")
def sweep_job(
    job: Task[Any],
    topology: Any,
    *,
    logical: Any = None,
    global_batch: int | None = None,
    report: Report = lambda what: None,
) -> Sweep:
    """Plan a job with all its rules and several numbers of logical devices, and rank the plans.

    A job whose layers are stacked is planned with 2, 4, 8 and 16 stages of a pipeline too, a job
    whose configuration divides positions with as many devices for these, and a job with experts
    with as many for them: one of the three at a time, for replicas of at most 16 devices that
    divide the slice. The configured numbers are planned, too.

    Cost:
        One compilation for each combination. A task with a choice of remat (`model.remat` of
        `topics_lm`) that is still "none" needs two or more: until a plan fits and more remat is
        not faster.

    Args:
        job: As for `plan_job`.
        topology: As for `plan_job`.
        logical: The only logical devices to try. None tries 1; for rules of tensor parallelism it
            tries those of 2, 4, 8 and 16 that divide the slice.
        global_batch: The rows of a batch, the same for all plans. None takes the rows that the
            configuration gives on the whole slice.
        report: Receives a line of text about the current work.

    Returns:
        A `Sweep`: print it, or take `.best`.

    Raises:
        The same errors as `plan_job`.

    Example:
        >>> from jaxdist.jobs import load_job, sweep_job
        >>> job = load_job("configs/digits_mirrored.toml", ["model.channels=[4]"])
        >>> found = sweep_job(job, "v5e:1x1")
        >>> {"replicated", "sharded_update", "fsdp"} <= {c.rules for c in found.ranked}
        True
    """
    _check_arguments(job, report)
    asked = job.config.strategy.logical_devices if logical is None else logical
    configured = make_target(topology, _count_devices(job, asked))
    if global_batch is None:
        rows = job.rows_per_replica * configured.strategy.num_replicas_in_sync
    else:
        rows = as_integer("global_batch", global_batch, least=1, most=MOST_ROWS, example=64)
    found: list[Candidate] = []
    layouts = list(_list_layouts(job, topology, logical))
    for number, (rules, count, parts) in enumerate(layouts, 1):
        report_candidate = _add_prefix(report, f"{number} of {len(layouts)}, ")
        divided = _divide(job, parts)
        for one in _plan_layout(divided, topology, rules, count, rows, report_candidate):
            found.append(dataclasses.replace(one, **parts._asdict()))
    asked = job.config.compiler.options
    notes = (f"Compiled with {format_options(asked)}.",) if asked else ()
    return Sweep(job.config.task, configured.name, rows, tuple(found), notes)


def _check_arguments(job: Any, report: Any) -> None:
    check_instance("job", job, Task, "a jobs.Task", "Pass jobs.load_job(path).")
    check_callable(report, "report", "Pass a function that takes one string, such as print.")


def _add_prefix(report: Report, before: str) -> Report:
    return lambda what: report(before + what)


class Parts(NamedTuple):
    """The sizes of the axes within a replica, besides that of the logical devices."""

    stages: int = 1
    positions: int = 1
    experts: int = 1


def _divide(job: Task[Any], parts: Parts) -> Task[Any]:
    """Return the job with these axes."""
    job = job.with_stages(parts.stages)
    strategy = dataclasses.replace(
        job.config.strategy, positions=parts.positions, experts=parts.experts
    )
    return type(job)(dataclasses.replace(job.config, strategy=strategy))


def _list_layouts(job: Task[Any], topology: Any, logical: Any) -> Iterator[tuple[str, Any, Parts]]:
    """Yield the combinations of rules, logical devices and other axes to try."""
    counts = list_logical_counts(topology)
    powers = [n for n in counts if 1 < n <= _MOST_LOGICAL and n & (n - 1) == 0]
    one_slice = count_slices(topology) == 1
    for rules in job.rules:
        if one_slice and find_partition(rules).is_in_slice and rules != job.rules[0]:
            continue  # on one slice these rules equal those without "in_slice"
        is_split = find_partition(rules).is_split
        of_logical = [logical] if logical is not None else powers if is_split else [1]
        own, every = _list_parts(job, rules, powers)
        for count, parts in itertools.product(of_logical, every):
            devices = math.prod(parts) * _count_logical(count)
            is_small = parts in (Parts(), own) or devices <= _MOST_LOGICAL
            if parts == Parts() or (is_small and devices in counts):
                yield rules, count, parts


def _list_parts(job: Task[Any], rules: str, sizes: Sequence[int]) -> tuple[Parts, list[Parts]]:
    """Return the configured axes, and all to try: one axis at a time, and the configured ones."""
    asked = job.config.strategy
    own = Parts(asked.stages, asked.positions, asked.experts)
    if rules in UPDATES:
        # An update that keeps pieces of whole parameters is neither on stages nor with experts.
        own = Parts(positions=own.positions)
        return own, list(dict.fromkeys((Parts(), own)))
    every = [Parts()]
    if job.is_stacked:
        every += [Parts(stages=n) for n in sizes]
    if asked.positions > 1:
        every += [Parts(positions=n) for n in sizes]
    if job.has_experts:
        every += [Parts(experts=n) for n in sizes]
    return own, list(dict.fromkeys((*every, own)))


def _plan_layout(
    job: Task[Any], topology: Any, rules: str, logical: Any, rows: int, report: Report
) -> Iterator[Candidate]:
    """Plan one combination with each remat of the task, as long as more of it may be faster.

    A configuration that sets `model.remat` keeps it.
    """
    # A replica that has all parameters gathers nothing.
    is_sharded = find_partition(rules).is_sharded
    remats = [name for name in job.remats if is_sharded or name != "parameters"]
    fastest = math.inf
    if not remats:
        remats = [""]
    elif job.config.model.remat != remats[0]:
        remats = [job.config.model.remat]
    for remat in remats:
        task = job.with_remat(remat) if remat else job
        label = report if not remat else _add_prefix(report, f"remat {remat}, ")
        found = _plan_candidate(task, topology, rules, logical, rows, label)
        yield dataclasses.replace(found, remat=remat)
        # More remat means more work and less memory. It is only faster if the compiler already
        # recomputes values that do not fit, or if the program does not fit at all.
        if found.plan is None and remat == remats[0]:
            return
        if found.seconds is not None:
            if found.seconds >= fastest:
                return
            fastest = found.seconds


def _plan_candidate(
    job: Task[Any], topology: Any, rules: str, logical: Any, rows: int, report: Report
) -> Candidate:
    """Plan one combination. If it is impossible, the candidate has the reason."""
    devices = _count_devices(job, logical)
    target = make_target(topology, devices)
    sizes = target.places.num_replicas, target.places.num_logical
    inner = list_inner_axes(job.config.strategy)
    among = "".join(f", {axis} {size}" for axis, size in inner.items())
    try:
        made = plan(
            _make_source(job, rules, logical),
            topology,
            devices,
            global_batch=rows,
            quick=True,
            report=_add_prefix(report, f"{rules}, {sizes[0]} x {sizes[1]}{among}: "),
        )
    # `sweep_job` has checked the slice, and each combination divides it.
    except JaxdistError as error:
        return Candidate(rules, *sizes, None, str(error).split("\n")[0])
    return Candidate(rules, *sizes, dataclasses.replace(made, name=job.config.task))


def _count_devices(job: Task[Any], logical: Any) -> Any:
    """Return the devices of a replica; the logical ones as they are where it has no other axes."""
    inner = list_inner_axes(job.config.strategy)
    return math.prod(inner.values()) * _count_logical(logical) if inner else logical


def _count_logical(logical: Any) -> int:
    """Return the number of logical devices, from a number or a shape."""
    if isinstance(logical, str):
        logical = [int(n) if n.isdigit() else 0 for n in logical.split("x")]
    if isinstance(logical, Sequence) and all(type(n) is int for n in logical):
        logical = math.prod(logical)
    return as_integer("logical", logical, least=1)


def _make_source(job: Task[Any], rules: str, logical: Any = 1) -> Source:
    inner, in_slices = list_inner_axes(job.config.strategy), find_partition(rules).is_in_slice
    count = _count_logical(logical) if inner else 1
    axes = make_axes(in_slices=in_slices, inner=inner, logical=count)
    rows = job.rows_per_replica
    return Source(
        lambda strategy, asked: job.lower(strategy, asked or rows, rules), rows, rules, axes=axes
    )
