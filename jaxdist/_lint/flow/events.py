"""What a program does that rules look at."""

import ast
import dataclasses

from jaxdist._lint.flow.facts import Fact, Function, Strategy


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One reduction over replicas, and what is known of the value before it."""

    node: ast.Call
    call: str  # as a reader knows it: 'all_reduce', 'lax.pmean', 'strategy.reduce'
    op: str  # 'sum', 'mean', or '' for another one
    axes: frozenset[str]
    before: Fact | None

    @property
    def is_mean_of_replicas(self) -> bool:
        """Whether it is a mean, and over replicas: a mesh may have other axes as well."""
        return self.op == "mean" and bool(self.axes & {"replicas", "data", "batch"})


@dataclasses.dataclass(frozen=True)
class Test:
    """A condition in a step that Python evaluates, and what is known of a value in it."""

    node: ast.expr
    value: ast.expr
    before: Fact | None


@dataclasses.dataclass(frozen=True)
class Run:
    """A call of `strategy.run`, with its step where that is a function of the program."""

    node: ast.Call
    strategy: Strategy
    step: Function | None


@dataclasses.dataclass(frozen=True)
class MetricUpdate:
    """A call that gives a metric a value, and what is known of the value."""

    node: ast.Call
    value: ast.expr
    before: Fact | None


@dataclasses.dataclass
class Events:
    """All events of one program, in the order in which they were read."""

    reductions: list[Reduction] = dataclasses.field(default_factory=list)
    tests: list[Test] = dataclasses.field(default_factory=list)
    metric_updates: list[MetricUpdate] = dataclasses.field(default_factory=list)
    runs: list[Run] = dataclasses.field(default_factory=list)
    # Calls that every process has to make.
    joint_calls: dict[int, str] = dataclasses.field(default_factory=dict)
    variables: set[str] = dataclasses.field(default_factory=set)

    @property
    def steps(self) -> list[Function]:
        """Every function that a strategy runs, once."""
        return list({id(r.step.node): r.step for r in self.runs if r.step}.values())
