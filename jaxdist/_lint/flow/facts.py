"""Facts about values, and events that rules check, read without running a program."""

import ast
import dataclasses
from collections.abc import Callable, Iterator

# Note [Facts]
# The reader (`reader.py`) goes through a program statement by statement, and has a fact or None
# for each name. None is always a valid answer: rules only report what they know. Comparisons
# ignore lines, since both branches of an `if` may give the same fact.


@dataclasses.dataclass(frozen=True)
class Fact:
    """A fact about a value."""


@dataclasses.dataclass(frozen=True)
class Batch(Fact):
    """The value depends on the rows of a batch, and the last batch may be uneven."""


@dataclasses.dataclass(frozen=True)
class LocalMean(Fact):
    """The mean over the rows of such a batch on one replica, or its gradient."""

    line: int = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Averaged(Fact):
    """A loss already divided by the size of the global batch, or its gradient."""

    line: int = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Reduced(Fact):
    """The result of a reduction over replicas."""

    op: str  # 'sum', 'mean', or '' for other ops
    axes: frozenset[str]
    by: ast.Call = dataclasses.field(compare=False)

    @property
    def line(self) -> int:
        """The line of the reduction."""
        return self.by.lineno


@dataclasses.dataclass(frozen=True)
class Parts(Fact):
    """A tuple, list or dict that the program writes out."""

    items: tuple[tuple[object, Fact | None], ...]

    def find(self, key: object) -> Fact | None:
        """Return the fact about one part."""
        return next((fact for name, fact in self.items if name == key), None)


@dataclasses.dataclass(frozen=True)
class Dataset(Fact):
    """A distributed dataset, or its iterator."""

    is_uneven: bool


@dataclasses.dataclass(frozen=True)
class Batched(Fact):
    """A dataset whose last batch may be smaller than the others."""


@dataclasses.dataclass(frozen=True)
class Options(Fact):
    """Options of a dataset."""

    is_even: bool  # a batch that cannot be split evenly is dropped or an error


@dataclasses.dataclass(frozen=True)
class Endless(Fact):
    """A dataset that repeats without end, before it is batched."""


@dataclasses.dataclass(frozen=True)
class Strategy(Fact):
    """A strategy, and the name of its class if the program calls it."""

    kind: str


@dataclasses.dataclass(frozen=True)
class Checkpoints(Fact):
    """`training.Checkpoints`, which all processes have to call."""


@dataclasses.dataclass(frozen=True)
class Metric(Fact):
    """A metric of Flax NNX or Keras, which adds up values and counts them."""


@dataclasses.dataclass(frozen=True)
class Variable(Fact):
    """A `Variable`, or its value."""


@dataclasses.dataclass(frozen=True)
class ReducingUpdate(Fact):
    """`sharded_update` or `compressed_update`, which reduce gradients themselves."""

    name: str
    op: str


@dataclasses.dataclass(frozen=True, eq=False)
class Function(Fact):
    """A function of the program, and the names around it."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: "Scope"
    is_method: bool = False


@dataclasses.dataclass(frozen=True)
class Gradient(Fact):
    """The result of `jax.grad` or `jax.value_and_grad`."""

    function: Function
    with_value: bool
    has_aux: bool


@dataclasses.dataclass
class Scope:
    """The names of a function or module, and of the scopes around it."""

    names: dict[str, Fact | None]
    parent: "Scope | None" = None

    def find(self, name: str) -> Fact | None:
        """Return the fact about a name."""
        if name in self.names:
            return self.names[name]
        return None if self.parent is None else self.parent.find(name)

    def __contains__(self, name: object) -> bool:
        """Return whether the program assigns a name that is visible here."""
        return name in self.names or (self.parent is not None and name in self.parent)


def depends_on_batch(fact: Fact | None) -> bool:
    """Return whether a value depends on the rows of a batch."""
    if isinstance(fact, Parts):
        return any(depends_on_batch(part) for _, part in fact.items)
    return isinstance(fact, Batch | LocalMean)


def join(one: Fact | None, other: Fact | None) -> Fact | None:
    """Return the fact about a value that is one of the two."""
    if one == other:
        return one
    return Batch() if depends_on_batch(one) or depends_on_batch(other) else None


def read_leaves(fact: Fact | None) -> Iterator[Fact | None]:
    """Iterate over the facts of all parts of a value."""
    if isinstance(fact, Parts):
        for _, part in fact.items:
            yield from read_leaves(part)
    else:
        yield fact


def map_leaves(function: Callable[[Fact | None], Fact | None], fact: Fact | None) -> Fact | None:
    """Apply a function to the facts of all parts of a value."""
    if isinstance(fact, Parts):
        return Parts(tuple((key, map_leaves(function, part)) for key, part in fact.items))
    return function(fact)


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

    def apply(self, before: Fact | None) -> Reduced:
        """Return the fact about the result, for one leaf."""
        axes = before.axes if isinstance(before, Reduced) else frozenset()
        return Reduced(self.op, self.axes | axes, self.node)


@dataclasses.dataclass(frozen=True)
class Test:
    """A condition in a step that Python evaluates, and a value in it that is not known then."""

    node: ast.expr
    value: ast.expr


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
    # Functions that `nn.pipeline_loss` and `nn.experts` run as parts of a step.
    parts: list[Function] = dataclasses.field(default_factory=list)
    # Calls that every process has to make.
    joint_calls: dict[int, str] = dataclasses.field(default_factory=dict)
    variables: set[str] = dataclasses.field(default_factory=set)

    @property
    def steps(self) -> list[Function]:
        """Every function that a strategy runs, once, and parts that are outside of these."""
        steps = {id(r.step.node): r.step for r in self.runs if r.step}
        inside = {id(node) for step in steps.values() for node in ast.walk(step.node)}
        parts = {id(f.node): f for f in self.parts if id(f.node) not in inside}
        return [*steps.values(), *parts.values()]
