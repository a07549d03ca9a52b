"""Events: the parts of a program that rules check."""

import ast
import dataclasses

from jaxdist._lint.flow.facts import Fact, Function, Strategy


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction over replicas, and the fact about the value before it."""

    node: ast.Call
    call: str  # the name that a reader knows: 'all_reduce', 'lax.pmean', 'strategy.reduce'
    op: str  # 'sum', 'mean', or '' for other ops
    axes: frozenset[str]
    before: Fact | None

    @property
    def is_mean_of_replicas(self) -> bool:
        """Whether it is a mean, and over replicas: a mesh may have other axes too."""
        return self.op == "mean" and bool(self.axes & {"replicas", "data", "batch"})


@dataclasses.dataclass(frozen=True)
class Test:
    """A condition in a step that Python evaluates, and the fact about a value in it."""

    node: ast.expr
    value: ast.expr
    before: Fact | None


@dataclasses.dataclass(frozen=True)
class Run:
    """A call of `strategy.run`, with its step if that is a function of the program."""

    node: ast.Call
    strategy: Strategy
    step: Function | None


@dataclasses.dataclass(frozen=True)
class MetricUpdate:
    """A call that passes a value to a metric, and the fact about the value."""

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
