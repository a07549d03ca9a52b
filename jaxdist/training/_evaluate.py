"""The training loop with its actions, and the evaluation on held-out data, row by row."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from jaxdist._called import called, refuse, refuse_type
from jaxdist._checkpoints import save_after
from jaxdist._collectives import ReduceOp
from jaxdist._strategies import Strategy, check_strategy, get_replica_context
from jaxdist._validate import (
    as_array,
    as_integer,
    as_iterator,
    as_list,
    check_callable,
    check_instance,
    check_keys,
    is_array,
    show,
)
from jaxdist.data import InputOptions, PartialBatch
from jaxdist.errors import ContextError, OtherProcessError, ShapeError

WEIGHT = "weight"

_ACTIONS = ("a list of training.Every", "Pass for instance actions=[training.Every(100, save)].")
_DATA = "Pass for instance a list of batches, or a distributed dataset."

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Every(Generic[S]):
    """An action after every `num_steps`-th step.

    Attributes:
        num_steps: A number n: the action runs after steps n, 2n, 3n, ...
        act: The callback, `(step, state) -> None`.
    """

    num_steps: int
    act: Callable[[int, S], None]

    @called("training.Every")
    def __post_init__(self) -> None:
        as_integer("num_steps", self.num_steps, least=1)
        check_callable(self.act, "act", "Pass a function: Every(100, save).")


@dataclasses.dataclass(frozen=True)
class LoopEnd(Generic[S]):
    """The result of a loop.

    Attributes:
        state: The state after the last step. After an interrupt, state that a step updates in
            place may be partly updated: do not save or use it.
        step: The number of completed steps, from the start of training.
        was_interrupted: Whether Ctrl-C ended the loop.
    """

    state: S
    step: int
    was_interrupted: bool


@called("training.run_loop")
def run_loop(
    state: S,
    step_fn: Callable[[S, Any], tuple[S, Any]],
    data: Iterable[Any],
    *,
    on_output: Callable[[int, Any], None] | None = None,
    actions: Sequence[Every[S]] = (),
    first_step: int = 0,
) -> LoopEnd[S]:
    """Call a step for each batch, and run actions every n steps.

    Cost:
        The loop does not wait for results: it dispatches steps ahead of the devices until an
        action or `on_output` reads a result. No collective.

    Guarantees:
        Ctrl-C ends the loop, and the result reports it. No action runs after it.
        Actions run in the given order, and only between steps.

    Args:
        state: The state before the first step.
        step_fn: `(state, batch) -> (state, out)`. Usually it calls `strategy.run`.
        data: The batches. The loop ends after the last one.
        on_output: Called with `(step, out)` after every step, before the actions.
        actions: The actions.
        first_step: The number of steps that earlier runs completed.

    Returns:
        The state, the number of completed steps, and whether Ctrl-C ended the loop.

    Raises:
        ArgumentError: `first_step` is below 0.
        ArgumentTypeError: An argument has the wrong type, or `step_fn` does not return a pair.
        OtherProcessError: Another process has ended, or did not answer in time. The state that
            `Checkpoints.on_failure` has registered is saved first.

    Example:
        >>> seen = []
        >>> log = Every(2, lambda step, state: seen.append((step, state)))
        >>> end = run_loop(0, lambda s, x: (s + x, None), range(5), actions=[log])
        >>> end.state, end.step, seen
        (10, 5, [(2, 1), (4, 6)])
    """
    check_callable(step_fn, "step_fn", "Pass a function (state, batch) -> (state, out).")
    if on_output is not None:
        check_callable(on_output, "on_output", "Pass a function (step, out), or None.")
    each = as_list("actions", actions, *_ACTIONS, kind=Every)
    step = as_integer("first_step", first_step, least=0)
    try:
        for batch in as_iterator("data", data, "an iterable of batches", _DATA):
            result = step_fn(state, batch)
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                raise refuse_type(
                    f"step_fn, which returned {show(result)}.",
                    "step_fn returns the next state and an output: (state, out).",
                    "Return (state, None) where there is no output.",
                )
            # Count the step before the callbacks: if Ctrl-C interrupts one of them, the step is
            # complete.
            state, out = result
            step += 1
            if on_output is not None:
                on_output(step, out)
            for action in each:
                if step % action.num_steps == 0:
                    action.act(step, state)
    except OtherProcessError as error:
        # The methods of a strategy have done this already; reading a batch or saving has not.
        save_after(error)
        raise
    except KeyboardInterrupt:
        # Return a result, not an exception: the caller needs `step` and the state for its report.
        return LoopEnd(state, step, was_interrupted=True)
    return LoopEnd(state, step, was_interrupted=False)


@called("training.weighted_sums")
def weighted_sums(per_row: dict[str, jax.Array], weight: jax.Array) -> dict[str, jax.Array]:
    """Return weighted sums over the rows of all replicas, without padding.

    Call it inside a replica.

    Shapes:
        In: every leaf is `[b]`, the rows of this replica; `weight` is `[b]`, 0 or false for
        padding.
        Out: scalars, equal on all replicas; `weight` is the sum of the weights.

    Cost:
        One all-reduce over the replicas, 4 bytes for each sum.

    Args:
        per_row: Values by name, one for each row.
        weight: The weight of each row. The mask of a padded batch counts each real row once.

    Returns:
        `{name: sum of weight * value, ..., "weight": sum of weight}` in float32.

    Raises:
        ContextError: Across replicas, in a scope or a merge function.
        ShapeError: A value or `weight` does not have the shape `[b]`.
        ArgumentTypeError: `per_row` is not a mapping, or a value is not an array of real numbers.

    Example:
        >>> strategy = MirroredStrategy()
        >>> def step(x):
        ...     return weighted_sums({"x": x}, x < 15)
        >>> x = jax.device_put(np.arange(16.0), strategy.per_replica_sharding)
        >>> sums = strategy.run(step, (PerReplica.of_global(x),))
        >>> float(sums["x"]), float(sums["weight"])
        (105.0, 15.0)
    """
    context = get_replica_context()
    if context is None:
        raise ContextError(
            "training.weighted_sums was called across replicas: in a strategy's scope or in a "
            "merge function.\n\nIt adds up the rows of one replica with those of the others.\n\n"
            "Call it inside the function that you pass to strategy.run."
        )
    what = "a dict of arrays by name, one value for each row"
    remedy = "Pass for instance per_row={'loss': losses}."
    check_instance("per_row", per_row, Mapping, what, remedy)
    check_keys("training.weighted_sums was given", "per_row", per_row)
    weight = _as_real("weight", weight)
    rows = {name: _as_real(f"per_row[{name!r}]", v) for name, v in per_row.items()}
    for name, value in rows.items():
        if value.shape != weight.shape or weight.ndim != 1:
            raise refuse(
                f"per_row[{name!r}] of shape {list(value.shape)} and weight of shape "
                f"{list(weight.shape)}.",
                "Both have one value for each row, [b].",
                "Reduce the other dims first: jnp.mean(value, axis=range(1, value.ndim)).",
                kind=ShapeError,
            )
    is_counted = weight != 0
    sums = {
        # `where` instead of a product: a padded row may hold NaN, and NaN * 0 is NaN.
        name: jnp.sum(jnp.where(is_counted, value * weight, 0.0))
        for name, value in rows.items()
    }
    sums[WEIGHT] = jnp.sum(weight)
    return context.all_reduce(ReduceOp.SUM, sums)


@called("training.weighted_sums")
def _as_real(name: str, value: Any) -> jax.Array:
    array = as_array(name, value)
    if jnp.iscomplexobj(array):
        raise refuse_type(
            f"{name}, {array.dtype}{list(array.shape)}.",
            "It adds up real numbers.",
            "Pass its parts under two names: value.real and value.imag.",
        )
    return array.astype(jnp.float32)


@called("training.evaluate called sums_fn, and it", replaces="The step")
def _run(strategy: Strategy, sums_fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return strategy.run(sums_fn, args)


@called(
    "training.evaluate",
    replaces=("experimental_distribute_dataset", "strategy.run"),
    arguments={"args[0]": "model"},
)
def evaluate(
    strategy: Strategy,
    sums_fn: Callable[[Any, Any, Any], dict[str, jax.Array]],
    model: Any,
    dataset: Any,
) -> dict[str, float]:
    """Return weighted means over all rows of a dataset.

    Shapes:
        In: global batches `[B, ...]` of any number of rows; the first is the largest.
        Inside a replica: `[b, ...]` and a mask `[b]`. `R*b` is the size of the first batch,
        rounded up to a multiple of the number of replicas `R`. All batches are padded to that
        size, so `sums_fn` is compiled once.

    Cost:
        One call of `sums_fn` for each batch. The results are fetched once, at the end.

    Guarantees:
        Each row counts once, with its weight, for any number of replicas and rows. Sums over
        batches are computed in 64 bits.

    Args:
        strategy: The strategy that runs `sums_fn`.
        sums_fn: `(model, batch, mask) -> weighted_sums(..., mask)`. Pass the same function in
            each call, so that it is compiled once.
        model: The first argument of `sums_fn`, mirrored.
        dataset: A dataset for `Strategy.experimental_distribute_dataset`:
            `jaxdist.data.batches(...)`, a list of batches, a loader.

    Returns:
        `{name: mean, ..., "weight": sum of the weights}`.

    Raises:
        ArgumentError: A dict has keys that cannot be sorted, such as 1 and 'a'.
        ArgumentTypeError: `sums_fn` does not return a dict, or a value in it is not a real number.
        ShapeError: The dataset has no batches, all weights are 0, or a batch is larger than the
            first.

    Example:
        >>> strategy = MirroredStrategy()
        >>> def count(offset, batch, mask):
        ...     return weighted_sums({"x": batch["x"] + offset}, mask)
        >>> evaluate(strategy, count, 1.0, jaxdist.data.batches({"x": np.arange(11.0)}, 8))
        {'weight': 11.0, 'x': 6.0}
    """
    check_strategy(strategy)
    check_callable(sums_fn, "sums_fn", "Pass a function (model, batch, mask) -> sums.")
    check_keys("training.evaluate was given", "model", model)
    # Pad, so that a short last batch has the shape of the others and needs no second program.
    options = InputOptions(partial_batch=PartialBatch.PAD)
    with iter(strategy.experimental_distribute_dataset(dataset, options)) as data:
        # No result is fetched in the loop: a fetch would wait for the devices after every batch.
        sums = [_run(strategy, sums_fn, (model, batch, mask)) for batch, mask in data]
    totals: dict[str, float] = {}
    for batch_sums in jax.device_get(sums):
        if not isinstance(batch_sums, dict):
            raise refuse_type(
                f"sums_fn, which returned {show(batch_sums)}.",
                "sums_fn returns what training.weighted_sums returns.",
                "End it with: return training.weighted_sums(per_row, mask).",
            )
        for name, value in sorted(batch_sums.items()):
            if not is_array(value) or jnp.shape(value) or jnp.iscomplexobj(value):
                raise refuse_type(
                    f"sums_fn, which returned {show(value)} for {name!r}.",
                    "sums_fn returns what training.weighted_sums returns: numbers by name.",
                    f"Pass the value of each row to it, or reduce {name!r} to one real number.",
                )
            totals[name] = totals.get(name, 0.0) + float(value)
    total_weight = totals.pop(WEIGHT, 0.0)
    # The weight is also 0 if the dataset has no batches.
    if total_weight <= 0:
        raise refuse(
            f"dataset of {len(sums)} batch(es) with a total weight of {total_weight:g}.",
            "It takes the mean over rows with a weight above 0.",
            "Pass a dataset with at least one row whose weight is above 0.",
            kind=ShapeError,
        )
    return {WEIGHT: total_weight, **{name: total / total_weight for name, total in totals.items()}}
