"""The loop of `fit`: epochs, dispatches of one or several steps, callbacks and validation."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxdist._called import called, refuse
from jaxdist._checkpoints import Interrupts
from jaxdist._strategies import Strategy
from jaxdist._validate import as_flag, as_integer, as_number, show
from jaxdist._values import PerReplica, is_per_replica
from jaxdist.errors import ShapeError
from jaxdist.fit._callbacks.base import Callback, CallbackList, Logs, check_watched
from jaxdist.fit._callbacks.saving import ModelCheckpoint, Position
from jaxdist.fit._history import History
from jaxdist.fit._loop import evaluation
from jaxdist.fit._loop.arguments import (
    MOST,
    as_batch_size,
    read_class_weight,
    read_examples,
    unpack_validation,
)
from jaxdist.fit._loop.feed import Feed, count_steps
from jaxdist.fit._loop.progress import Progress, as_verbose
from jaxdist.fit._loop.resuming import Start, describe_states, find_start, restore
from jaxdist.fit._loop.together import check_same_call
from jaxdist.fit._loop.totals import StateBefore, Totals
from jaxdist.fit._stages import check_no_stages
from jaxdist.fit._step.output_losses import ClassWeights

_CALLER = "fit.Model.fit"
_CALLER_OF_VALIDATION = "fit.Model.fit, for validation_data,"


@dataclasses.dataclass
class FitArguments:
    """The arguments of `Model.fit`, which documents them."""

    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: Any
    callbacks: Sequence[Callback]
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: Mapping[int, float] | None
    sample_weight: Any
    initial_epoch: int | None
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int
    seed: int

    @called(_CALLER)
    def check(self) -> None:
        """Check numbers and flags."""
        as_integer("epochs", self.epochs, least=1, most=MOST)
        as_verbose(self.verbose)
        as_integer("validation_freq", self.validation_freq, least=1)
        as_integer("seed", self.seed, least=0)
        if self.initial_epoch is not None:
            as_integer("initial_epoch", self.initial_epoch, least=0)
        for name in ("steps_per_epoch", "validation_steps", "validation_batch_size"):
            if getattr(self, name) is not None:
                as_integer(name, getattr(self, name), least=1, most=MOST)
        as_flag("shuffle", self.shuffle)
        fraction = as_number("validation_split", self.validation_split, least=0.0)
        if fraction >= 1:
            raise refuse(
                f"validation_split={fraction}.",
                "It is the fraction of the examples that is held out, below 1.",
                "Pass for instance validation_split=0.1.",
            )


@called(_CALLER)
def fit(model: Any, given: FitArguments) -> History:
    """Train a model; `Model.fit` documents it."""
    compiled = model.get_compiled("fit")
    model._check_is_not_fitting("fit")
    model._check_has_parameters("fit")
    # It may have been placed after `compile`.
    check_no_stages(model.module, model.strategy.layout)
    given.check()
    examples = read_examples(given.x, given.y, given.sample_weight, needs_y=True)
    size = as_batch_size(given.batch_size, examples)
    held_out = given.validation_data
    if given.validation_split and held_out is None:
        if examples is None:
            raise refuse(
                f"validation_split={given.validation_split} and a dataset.",
                "Only examples in memory can be split.",
                "Pass validation_data=another dataset.",
            )
        examples, kept = examples.split(given.validation_split)
        held_out = (kept.x, kept.y, kept.weight)
    classes = read_class_weight(given.class_weight)
    source = given.x if examples is None else examples
    num_steps = count_steps(source, size, given.steps_per_epoch)
    verbose = as_verbose(given.verbose) if model.writes_logs else 0
    params = {"epochs": given.epochs, "steps": num_steps, "verbose": verbose}
    callbacks = CallbackList(given.callbacks, model, params)
    check_watched(callbacks.callbacks, validates=held_out is not None)
    validate = _make_validation(model, given, held_out, size, callbacks)
    with contextlib.closing(callbacks):
        start = find_start(model, callbacks.callbacks, given.initial_epoch)
        check_same_call(
            model.strategy,
            {
                "epochs": given.epochs,
                "the first epoch": start.epoch + 1,
                "steps_per_epoch": given.steps_per_epoch,
                "whether it validates": held_out is not None,
                "validation_freq": given.validation_freq,
                "validation_steps": given.validation_steps,
                "save_freq of each ModelCheckpoint": [s._every or "epoch" for s in start.savers],
            },
        )
        continues = start.position if start.continues else None
        feed = Feed(
            model.strategy,
            source,
            batch_size=size,
            shuffle=given.shuffle,
            seed=given.seed,
            first_pass=max(model._passes, start.epoch) if continues is None else continues.passes,
            steps=given.steps_per_epoch,
            epochs=max(given.epochs - start.epoch, 0),
            notes_positions=any(saver._saves_steps for saver in start.savers),
            continues=continues,
        )
        model.history = History(params=params)
        model.stop_training = False
        model._validates_every = None if held_out is None else given.validation_freq
        model._validates_average = callbacks.has("_in_evaluation")
        progress = Progress(verbose, given.epochs, num_steps)
        loop = _Loop(model, compiled, feed, callbacks, progress, classes, start)
        model._is_fitting = True
        try:
            loop.run(given.epochs, validate, given.validation_freq)
        finally:
            model._is_fitting = False
            model._passes = feed.passes
            # Also after Ctrl-C or an error: afterwards no step may change the model.
            compiled.runner.wait()
        callbacks.complete()
    return model.history


class _Loop:
    """The steps of an epoch, and the position of the training."""

    def __init__(
        self,
        model: Any,
        compiled: Any,
        feed: Feed,
        callbacks: CallbackList,
        progress: Progress,
        classes: ClassWeights | None,
        start: Start,
    ) -> None:
        self._model, self._compiled, self._feed = model, compiled, feed
        self._callbacks, self._progress, self._classes = callbacks, progress, classes
        self._begins = callbacks.has("on_train_batch_begin")
        self._ends = callbacks.has("on_train_batch_end")
        self._start = start
        # The last complete epoch, or the step after which the first one continues.
        self._position = start.position
        self._savers = start.savers if model.writes_checkpoints else ()
        for saver in self._savers:
            saver._find_position = self._find_position

    def run(
        self, epochs: int, validate: Callable[[], dict[str, float]] | None, validation_freq: int
    ) -> None:
        """Run the remaining epochs."""
        model, callbacks = self._model, self._callbacks
        progress, start = self._progress, self._start
        logs: dict[str, float] = dict(start.position.logs)
        with Interrupts() as interrupts, progress:
            callbacks.call("on_train_begin", {})
            first, is_begun = start.epoch, start.position.step > 0
            if is_begun and first < epochs:
                callbacks.call("on_epoch_begin", first, {})
            restore(model, callbacks.callbacks, start)
            if start.savers:
                # Raise for a state that cannot be saved now, not after the first epoch.
                describe_states(callbacks.callbacks)
            # A callback that ended the training ends it again when it gets its state. An epoch that
            # the user gave to `fit` begins in any case.
            has_ended = start.continues and model.stop_training
            if start.saver is not None:
                model.stop_training = has_ended
            start.tell(progress, epochs, has_ended=has_ended)
            for epoch in range(first, first if has_ended else epochs):
                if epoch > first or not is_begun:
                    callbacks.call("on_epoch_begin", epoch, {})
                progress.begin(epoch)
                logs = self._run_epoch(epoch, interrupts)
                if validate is not None and (epoch + 1) % validation_freq == 0:
                    logs |= {f"val_{name}": value for name, value in validate().items()}
                model.history.add(epoch, logs)
                progress.end(logs)
                self._position = dataclasses.replace(
                    self._position, epochs=epoch + 1, logs=dict(logs)
                )
                callbacks.call("on_epoch_end", epoch, logs)
                # Do not lose an interrupt in the last step of the last epoch.
                interrupts.check()
                if model.stop_training:
                    break
            callbacks.call("on_train_end", logs)

    def _run_epoch(self, epoch: int, interrupts: Interrupts) -> dict[str, float]:
        """Run all steps of an epoch, and return its loss and metrics."""
        compiled, model, before = self._compiled, self._model, self._position
        totals = Totals(compiled, self._feed.describe_batch, before.sums)
        most = compiled.steps_per_execution
        step, done = before.step, before.steps
        due: list[ModelCheckpoint] = []
        data: tuple[int, Any] = (0, None)
        for group in group_batches(self._feed.epoch(step), most):
            # Save only now: the end of an epoch is saved together with its validation.
            if due:
                compiled.runner.wait()
                position = dataclasses.replace(before, step=step, steps=done, sums=totals.sums())
                position = self._complete(position, data)
                for saver in due:
                    saver._save(position)
            interrupts.check()
            if self._begins:
                self._callbacks.call("on_train_batch_begin", step, {})
            old = StateBefore(model, group) if compiled.find_nonfinite else None
            output = compiled.runner.train(model.module, compiled.optimizer, group, self._classes)
            if old is not None:
                old.check(compiled.runner.fetch(output), step, self._feed.describe_batch(step))
            totals.add(step, output)
            step += len(group)
            self._progress.advance(step, totals)
            if self._ends:
                totals.fetch()
                self._callbacks.call("on_train_batch_end", step - 1, totals.logs())
                if model.stop_training:
                    break
            done = before.steps - before.step + step
            due = [saver for saver in self._savers if saver._is_due(done - len(group), done)]
            if due:
                data = self._feed.get_state(step)
        if not model.stop_training:
            self._feed.check_not_empty(step, epoch, before.step)
        compiled.runner.wait()
        totals.fetch()
        if totals.has_no_examples():
            raise refuse(
                f"a dataset whose batches ({step}) of epoch {epoch + 1} have no examples.",
                "The loss is a mean over examples, so an epoch has at least one.",
                "Look at what makes the batches, such as a filter that drops all examples.",
                kind=ShapeError,
            )
        self._position = Position(epoch, steps=before.steps - before.step + step)
        return totals.logs()

    def _find_position(self, epoch: int, logs: Logs) -> Position:
        for saver in self._savers:
            saver._judge(epoch, logs)
        return self._complete(self._position, self._feed.get_state())

    def _complete(self, position: Position, data: tuple[int, Any]) -> Position:
        """Return a position with the position of the data and the states of the callbacks."""
        passes, position_of_data = data
        states, arrays = describe_states(self._callbacks.callbacks)
        return dataclasses.replace(
            position, passes=passes, data=position_of_data, callbacks=states, arrays=arrays
        )


def group_batches(batches: Iterable[Any], most: int) -> Iterator[list[Any]]:
    """Yield groups of up to `most` batches of one shape, each for one dispatch."""
    if most == 1:
        for batch in batches:
            yield [batch]
        return
    group: list[Any] = []
    for batch in batches:
        if group and (len(group) == most or _describe(batch) != _describe(group[0])):
            yield group
            group = []
        group.append(batch)
    if group:
        yield group


def _describe(batch: Any) -> Any:
    """Return structure, shapes and dtypes of a batch; for each replica if they may differ."""
    leaves, tree = jax.tree.flatten(batch, is_leaf=is_per_replica)
    return tree, [
        tuple((v.shape, v.dtype) for v in leaf.values)
        if isinstance(leaf, PerReplica)
        else (leaf.shape, leaf.dtype)
        for leaf in leaves
    ]


@called(_CALLER)
def _make_validation(
    model: Any, given: FitArguments, held_out: Any, batch_size: int, callbacks: CallbackList
) -> Callable[[], dict[str, float]] | None:
    if held_out is None:
        return None
    x, y, weight = unpack_validation(held_out)
    examples = read_examples(x, y, weight, needs_y=True, of_validation=True)
    if examples is None and given.validation_batch_size is not None:
        raise refuse(
            f"validation_batch_size={given.validation_batch_size} and a dataset as "
            "validation_data.",
            "A dataset has batches of its own size.",
            "Leave out validation_batch_size.",
        )
    size = given.validation_batch_size or batch_size
    source = x if examples is None else examples
    steps = given.validation_steps

    @called(_CALLER_OF_VALIDATION)
    def validate() -> dict[str, float]:
        return evaluation.measure(model, source, size, steps, callbacks)

    return validate


@called(lambda method: f"fit.Model.{method}")
def count_examples(method: str, x: Any, y: Any, weight: Any) -> int:
    """Return the number of examples of one batch in memory."""
    examples = read_examples(x, y, weight)
    if examples is None:
        raise refuse(
            f"x={show(x)}, a dataset.",
            "It takes one batch.",
            "Pass arrays, or call fit, evaluate or predict with the dataset.",
        )
    return examples.count


def train_on_batch(
    model: Any, x: Any, y: Any, weight: Any, class_weight: Mapping[int, float] | None
) -> dict[str, float]:
    """Run one step; `Model.train_on_batch` documents it."""
    compiled = model.get_compiled("train_on_batch")
    model._check_has_parameters("train_on_batch")
    strategy: Strategy = model.strategy
    count = count_examples("train_on_batch", x, y, weight)
    examples = read_examples(x, y, weight, needs_y=True)
    classes = read_class_weight(class_weight)
    feed = Feed(
        strategy, examples, batch_size=count, shuffle=False, seed=0, first_pass=0, steps=None
    )
    totals = Totals(compiled, feed.describe_batch)
    for batch in feed.epoch():
        totals.add(0, compiled.runner.train(model.module, compiled.optimizer, [batch], classes))
    compiled.runner.wait()
    totals.fetch()
    return totals.logs()
