"""`Program.compile_for`: the same step for a slice that need not be there."""

import functools
from collections.abc import Callable
from typing import Any

from jaxdist._planning.abstract_call import abstract_call, rows_per_replica
from jaxdist._planning.planner import Source, plan
from jaxdist._program import Program, RunOptions
from jaxdist._strategies import Strategy
from jaxdist.explain import SlicePlan


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
) -> SlicePlan:
    """Plan a program that `strategy.lower(fn, ...)` made."""
    lower = functools.partial(_lower, fn, options, program)
    source = Source(lower, rows_per_replica(program), like=strategy)
    wanted = strategy.layout.num_logical if logical is None else logical
    return plan(source, topology, wanted, global_batch=global_batch, quick=quick)


def _lower(
    fn: Callable[..., Any],
    options: RunOptions | None,
    program: Program,
    strategy: Strategy,
    rows: int | None,
) -> Program:
    args, kwargs = abstract_call(program, strategy.layout, rows)
    return strategy.lower(fn, args, kwargs, options)
