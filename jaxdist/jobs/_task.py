"""The base class of tasks: a model, its steps, its data, and how to describe its results."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar, final

import jax
import numpy as np
from flax import nnx

from jaxdist import partition
from jaxdist._called import called, refuse
from jaxdist._program import Program, RunOptions
from jaxdist._strategies import Strategy, check_strategy
from jaxdist._typing import PyTree
from jaxdist._validate import ErrorNote, as_integer, as_number, check_instance, check_text, show
from jaxdist._values import PerReplica
from jaxdist.data import batches
from jaxdist.errors import ShapeError, UnsupportedError
from jaxdist.jobs._config.checks import MOST_ROWS
from jaxdist.jobs._config.load import LoadedConfig
from jaxdist.jobs._config.schema import JobConfig, check_choice
from jaxdist.jobs._partitions import PARTITIONS, UPDATES
from jaxdist.jobs._rules import make_rules
from jaxdist.jobs._strategy import count_replicas
from jaxdist.jobs._tables import find_tables, make_optimizer

Measures = Mapping[str, float]
C = TypeVar("C", bound=JobConfig)


@final
@dataclasses.dataclass(frozen=True)
class Curve:
    """A measure of the evaluations, which the learning curve shows over the steps.

    Attributes:
        measure: Its name: a key of what `Task.measures` returns.
        label: The label of its axis.
        factor: Multiplies the values, for instance by 100 for percent.

    Raises:
        ArgumentError: A string is empty, or the factor is not finite.
        ArgumentTypeError: `measure`, `label` or `factor` has the wrong type.

    Example:
        >>> Curve("accuracy", "held-out accuracy (%)", factor=100.0).measure
        'accuracy'
    """

    measure: str
    label: str
    factor: float = 1.0

    @called("jobs.Curve")
    def __post_init__(self) -> None:
        check_text("measure", self.measure, "accuracy")
        check_text("label", self.label, "held-out accuracy (%)")
        as_number("factor", self.factor, example=100.0)


@final
@dataclasses.dataclass(frozen=True)
class Data:
    """The examples of a task; `Task.load` returns them.

    Attributes:
        train: A pytree of NumPy arrays `[N, ...]`, with the same number of examples `N`.
        held_out: The same, for evaluations.
        identity: The values that determine which examples are held out, by name, in types that
            JSON can represent. A run resumes only with the same values: a different split would
            evaluate on examples that the model was trained on.

    Raises:
        ShapeError: A leaf is a scalar, leaves of one part have different numbers of examples, or
            a part has no arrays.
        ArgumentTypeError: A leaf holds Python objects, or `identity` is not a dict.

    Example:
        >>> rows = {"x": np.arange(10.0), "y": np.arange(10.0) ** 2}
        >>> data = Data(*split_rows(rows, 0.2, seed=0), {"seed": 0, "test_fraction": 0.2})
        >>> data.train["x"].shape, data.held_out["y"].shape
        ((8,), (2,))
    """

    train: PyTree
    held_out: PyTree
    identity: dict[str, Any]

    @called("jobs.Data", replaces="data.batches")
    def __post_init__(self) -> None:
        for name in ("train", "held_out"):
            part = getattr(self, name)
            # Where a part has no examples, `check_job` says which entry to set.
            if {np.shape(x)[:1] for x in jax.tree.leaves(part)} != {(0,)}:
                with ErrorNote(f"These are the arrays of jobs.Data({name}=...)."):
                    batches(part, 1)
        remedy = 'Pass for instance identity={"seed": 0, "test_fraction": 0.2}.'
        what = "a dict of the values that determine which examples are held out"
        check_instance("identity", self.identity, dict, what, remedy)


@called("jobs.split_rows", replaces="data.batches")
def split_rows(arrays: PyTree, test_fraction: float, seed: int) -> tuple[PyTree, PyTree]:
    """Return the examples to train on, and the held-out ones.

    Shapes:
        In: every leaf `[N, ...]`, the same `N` from 2 up. Out: the same leaves with `N - n` rows,
        and with `n` rows: about `test_fraction * N`, and at least 1 in each part.

    Guarantees:
        The choice depends only on `seed` and `N`. Each row is in one of the parts, and leaves
        stay aligned.

    Args:
        arrays: A pytree of NumPy arrays, or of what NumPy can read.
        test_fraction: The fraction that is held out, more than 0 and less than 1.
        seed: The seed of the choice.

    Raises:
        ShapeError: A leaf is a scalar, leaves have different numbers of rows, or there are fewer
            than 2.
        ArgumentError: `test_fraction` is not between 0 and 1, or `seed` is below 0.
        ArgumentTypeError: An argument has another type.

    Example:
        >>> [len(part) for part in split_rows(np.arange(10), 0.25, seed=0)]
        [8, 2]
    """
    fraction = as_number("test_fraction", test_fraction, example=0.2)
    if not 0 < fraction < 1:
        raise refuse(
            f"test_fraction={show(test_fraction)}.",
            "test_fraction is more than 0 and less than 1.",
            "Pass for instance test_fraction=0.2.",
        )
    as_integer("seed", seed, least=0)
    read = batches(arrays, 1)
    rows = read.num_examples
    if rows < 2:
        raise refuse(
            "arrays with one row.",
            "One row or more is held out, and one or more is trained on.",
            "Pass 2 rows or more.",
            kind=ShapeError,
        )
    order = np.random.default_rng(seed).permutation(rows)
    # At least one row on each side, even for an extreme fraction.
    count = min(max(1, round(rows * fraction)), rows - 1)

    def take(chosen: np.ndarray) -> PyTree:
        return jax.tree.map(lambda x: x[chosen], read.arrays)

    return take(order[count:]), take(order[:count])


class Task(abc.ABC, Generic[C]):
    """The parts of a training that differ: a model, its steps, its data, and its results in words.

    `train` and `plan_job` do everything else for all tasks. A task reads its data at the first
    use of `data`, so a plan reads no data. `docs/how-to/tasks.md` shows a task of one's own.

    A subclass defines the attributes without a default, and `make_model`, `batch`, `load` and
    `measures`. A configuration selects it with `task = "module:Class"`.

    Args:
        config: An instance of `config_type`.

    Attributes:
        config_type: The class of the configuration: `JobConfig`, or a subclass with more sections.
        title: A name for people.
        examples: The name of the rows of a batch, such as images or windows.
        unit: The unit of throughput, such as images or bytes.
        curve: The measure that the learning curve shows; it is in the metrics file, too.
        in_words: A format string of the measures: the line of an evaluation.
        headline: The same, for the last line of a run.
        can_split: Whether the model has layers that tensor parallelism splits.
        stack: The pattern of the parameters of stacked layers, such as `"layers/**"`, which
            `strategy.stages` puts on the stages of a pipeline. The train step then calls
            `nn.pipeline_loss`. Empty for a model without such layers.
        experts: The pattern of the parameters of experts, dim 0 of which is the number of the
            expert (after those of a stack). `strategy.experts` divides them over devices of a
            replica, and the model calls `nn.experts`. Empty for a model without experts.
        divides_positions: Whether the model takes `strategy.positions`, `attention` and `order`:
            the steps call `nn.split_positions`, and the model `nn.attention`.
        remats: The values of the entry `model.remat`: how much the backward pass recomputes, from
            nothing to most. Empty for a task without such an entry.
        train_step: `(model, optimizer, batch) -> mean loss`, inside a replica. Instead of the loss
            it may return a dict of scalars, `"loss"` and others, which the metrics have for each
            step, too.
        evaluation_step: `(model, batch, mask) -> weighted_sums(...)`, inside a replica; the
            weights are numbers of units.

    Raises:
        ArgumentTypeError: `config` is not a `config_type`.

    Example:
        >>> from jaxdist.jobs import load_job
        >>> task = load_job("configs/digits_mirrored.toml")
        >>> task.title, task.batch(4)["image"].shape
        ('digits', (4, 8, 8, 1))
    """

    config_type: ClassVar[type[JobConfig]] = JobConfig
    title: ClassVar[str]
    examples: ClassVar[str]
    unit: ClassVar[str]
    curve: ClassVar[Curve]
    in_words: ClassVar[str]
    headline: ClassVar[str]
    can_split: ClassVar[bool] = False
    stack: ClassVar[str] = ""
    experts: ClassVar[str] = ""
    divides_positions: ClassVar[bool] = False
    remats: ClassVar[tuple[str, ...]] = ()
    # The steps are class attributes, so that they are the same functions each time: jaxdist
    # compiles a step once for each function.
    train_step: ClassVar[Callable[..., Any]]
    evaluation_step: ClassVar[Callable[..., Any]]

    @called(lambda self: type(self).__name__)
    def __init__(self, config: C) -> None:
        kind = self.config_type.__name__
        remedy = "Pass load_job_config(path).values."
        check_instance("config", config, self.config_type, f"a {kind}", remedy)
        self.config: C = config

    @classmethod
    def check(cls, loaded: LoadedConfig[Any]) -> None:
        """Check that the entries of the task's own sections fit each other."""
        del loaded

    # Model

    @abc.abstractmethod
    def make_model(self, rngs: nnx.Rngs) -> nnx.Module:
        """Make the model, on the default device or abstract."""

    # Data

    @abc.abstractmethod
    def batch(self, rows: int) -> PyTree:
        """Return the shapes of a global batch of `rows` rows."""

    @abc.abstractmethod
    def load(self) -> Data:
        """Load the examples. Users read `data`."""

    @functools.cached_property
    def data(self) -> Data:
        """The examples, loaded at the first use."""
        return self.load()

    @property
    def units_per_example(self) -> int:
        """The units of throughput in one row."""
        return 1

    # Results

    @abc.abstractmethod
    def measures(self, means: Measures) -> dict[str, float]:
        """Return the measures of an evaluation, for the history."""

    def finish(self, strategy: Strategy, model: nnx.Module) -> tuple[dict[str, Any], str]:
        """Use the trained model. Return entries for the metrics file, and a string to print."""
        del strategy, model
        return {}, ""

    # What all tasks share

    @property
    def rows_per_replica(self) -> int:
        """The configured batch size, divided by the number of replicas without accelerators."""
        return max(1, self.config.data.batch_size // count_replicas(self.config))

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of the rules that can place the state, the configured one first.

        These are the names of the table of partitions, and the kinds of update.
        """
        own: str = self.config.strategy.partition
        if own == "replicated":
            named = (n for n, update in UPDATES.items() if update == self.config.optimizer.update)
            own = next(named, own)
        fitting = [n for n, found in PARTITIONS.items() if self.can_split or not found.is_split]
        every = ("replicated", "sharded_update", *fitting)
        return tuple(dict.fromkeys((own, *every)))

    @called(lambda self: f"{type(self).__name__}.with_rules")
    def with_rules(self, rules: str) -> Self:
        """Return the task with its state placed by `rules`: one of `self.rules`, or an update.

        Raises:
            ArgumentError: The task does not have these rules.
        """
        check_choice("rules", rules, tuple(dict.fromkeys((*self.rules, *UPDATES))))
        config, placed = self.config, "replicated" if rules in UPDATES else rules
        update = UPDATES.get(rules, "replicated")
        return type(self)(
            dataclasses.replace(
                config,
                strategy=dataclasses.replace(config.strategy, partition=placed),
                optimizer=dataclasses.replace(config.optimizer, update=update),
            )
        )

    @called(lambda self: f"{type(self).__name__}.with_remat")
    def with_remat(self, remat: str) -> Self:
        """Return the task with another one of `remats` as its entry `model.remat`.

        Raises:
            ArgumentError: The task does not have this value, or has no remats.
        """
        if not self.remats:
            raise refuse(
                f"remat={show(remat)}, and the task has no remat.",
                "Only tasks with an entry model.remat have one.",
                "Use the task as it is.",
            )
        check_choice("remat", remat, self.remats)
        config: Any = self.config
        model = dataclasses.replace(config.model, remat=remat)
        return type(self)(dataclasses.replace(config, model=model))

    @property
    def is_stacked(self) -> bool:
        """Whether the layers of the model are stacked, so that a pipeline can have them."""
        return bool(self.stack)

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts, which devices of a replica can divide."""
        return bool(self.experts)

    @called(lambda self: f"{type(self).__name__}.with_stages")
    def with_stages(self, stages: int) -> Self:
        """Return the task with another `strategy.stages`, and the configured chunks if above 1.

        Raises:
            ArgumentError: `stages` is less than 1 or very large, or the task has no stacked layers.
        """
        stages = as_integer("stages", stages, least=1, most=1 << 20)
        if stages > 1 and not self.stack:
            raise refuse(
                f"stages={stages}, and the model has no stacked layers.",
                "Stacked layers are the stages of a pipeline.",
                "Pass stages=1.",
            )
        config = self.config
        chunks = config.strategy.chunks if stages > 1 else 1
        asked = dataclasses.replace(config.strategy, stages=stages, chunks=chunks)
        return type(self)(dataclasses.replace(config, strategy=asked))

    @property
    def options(self) -> RunOptions:
        """The options with which the train step runs."""
        return RunOptions(
            donate_argnums=(0, 1) if self.config.training.donate else (),
            compiler_options=self.config.compiler.options,
            saved_program=self.config.training.program or None,
        )

    def build(self, strategy: Strategy, *, abstract: bool = False) -> tuple[Any, Any]:
        """Make and place the model and its optimizer; with shapes for arrays if `abstract`."""
        asked, optimizing = self.config.strategy, self.config.optimizer
        placed = PARTITIONS[asked.partition]
        # With FSDP, a replica has only pieces of the gradients, and clipping needs the norm of all
        # of them. `sharded_update` computes that norm over the replicas.
        if placed.is_sharded and optimizing.update == "replicated":
            optimizing = dataclasses.replace(optimizing, update="sharded")

        def make() -> tuple[Any, Any]:
            model = self.make_model(nnx.Rngs(self.config.training.seed))
            return model, make_optimizer(model, optimizing, num_steps=self.config.training.steps)

        with strategy.scope():
            model, optimizer = nnx.eval_shape(make) if abstract else make()
            tables = find_tables(model)
            if tables and abstract:
                raise UnsupportedError(
                    f"{type(self).__name__}.build was called with abstract=True, and the model has "
                    f"the table {next(iter(tables))!r}.\n\n"
                    "A table is on parameter servers, and plans do not cover those.\n\n"
                    "Run the job with few rows and few steps: --set model.rows=1024."
                )
            for table in tables.values():
                table.create()
        # With replicated parameters, `sharded_update` places its own state.
        if asked.partition != "replicated" or asked.stages > 1 or asked.experts > 1:
            rules = make_rules(asked, stack=self.stack, experts=self.experts)
            partition.place(strategy, (model, optimizer), rules)
        return model, optimizer

    @called(
        lambda self: f"{type(self).__name__}.lower",
        replaces=lambda self: f"{type(self).__name__}.with_rules",
    )
    def lower(self, strategy: Strategy, rows: int, rules: str) -> Program:
        """Lower the train step, with the model, its optimizer and a batch as shapes.

        Args:
            strategy: The strategy whose replicas run the step. It may only be able to compile.
            rows: The rows of a batch for each replica.
            rules: As for `with_rules`.
        """
        check_strategy(strategy)
        rows = as_integer("rows", rows, least=1, most=MOST_ROWS)
        task = self.with_rules(rules)
        shapes = task.batch(rows * strategy.num_replicas_in_sync)
        args = (*task.build(strategy, abstract=True), jax.tree.map(PerReplica.of_global, shapes))
        return strategy.lower(type(task).train_step, args, options=task.options)
