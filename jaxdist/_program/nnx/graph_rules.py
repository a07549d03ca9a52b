"""Rules that make NNX variables equal on all replicas after a step."""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist._collectives import mean_over_replicas
from jaxdist._typing import AxisNames
from jaxdist._values import mean_of_shares, share_of_mean, widen


class Rule(enum.Enum):
    """How the values of all replicas become one value."""

    MEAN = "mean"  # batch statistics
    SUM = "sum"  # of the amounts that the replicas added to a metric
    MOMENTS = "moments"  # count, mean and squared deviations of each replica's rows
    LARGEST = "largest"  # counters of random streams: no random number is drawn twice


@dataclasses.dataclass(frozen=True)
class Combination:
    """Variables of NNX objects, by leaf number, that one rule combines together."""

    rule: Rule
    numbers: tuple[int, ...]


def enter_replica(kind: type, value: Any, axes: AxisNames) -> Any:
    """Return a variable's value on one replica. A random key gets the replica's index folded in."""
    if issubclass(kind, nnx.RngKey):
        return _fold_in_replica(value, axes)
    return value


def leave_replica(kind: type, before: Any, entered: Any, after: Any, axes: AxisNames) -> Any:
    """Return a variable's value for the next step. An unassigned random key keeps its old value."""
    if not issubclass(kind, nnx.RngKey):
        return after
    return before if after is entered else _keys_for_next_step(before, entered, after, axes)


def is_metric(kind: type) -> bool:
    """Whether a variable sums up what all replicas add to it, even if they add equal amounts."""
    return issubclass(kind, nnx.metrics.MetricState)


def rule_of(kind: type) -> Rule | None:
    """Return the rule for a variable that differs between replicas; None if it has no rule.

    Metrics have no rule here: it depends on what the step does with them.
    """
    if issubclass(kind, nnx.BatchStat):
        return Rule.MEAN
    if issubclass(kind, nnx.RngCount):
        return Rule.LARGEST
    return None


def combine(
    combination: Combination,
    before: Sequence[Any],
    after: Sequence[Any],
    axes: AxisNames,
    takes_part: tuple[bool, ...] | None = None,
) -> list[Any]:
    """Return the values of some variables after a step.

    For metrics, `after` is the amount that a replica added.

    Args:
        combination: The rule and the variables.
        before: Their values before the step.
        after: Their values on this replica after the step.
        axes: The replica axes.
        takes_part: For each replica, whether it has rows; None if all have.
    """
    counts = None if takes_part is None else jnp.asarray(takes_part)[jax.lax.axis_index(axes)]
    # Without any rows there is nothing to average or add. Random streams advance nevertheless.
    if takes_part is not None and not any(takes_part) and combination.rule is not Rule.LARGEST:
        return [b.reshape(a.shape) for b, a in zip(before, after, strict=True)]
    if combination.rule is Rule.MOMENTS:
        return _merge_moments(before, after, axes, counts)
    if combination.rule is Rule.LARGEST:
        return [jax.lax.pmax(x, axes) for x in after]
    if combination.rule is Rule.SUM:
        return [_add_up(*pair, axes, counts) for pair in zip(before, after, strict=True)]
    return [_average(x, axes, takes_part, counts) for x in after]


def _average(x: Any, axes: AxisNames, takes_part: tuple[bool, ...] | None, counts: Any) -> Any:
    wide = widen(x)
    if takes_part is None:
        return mean_over_replicas(wide, axes).astype(x.dtype)
    # Replicas without rows must not count: the mean of no rows is nan.
    num = sum(takes_part)
    total = jax.lax.psum(jnp.where(counts, share_of_mean(wide, num), 0), axes)
    return mean_of_shares(total, wide.dtype, num).astype(x.dtype)


def _add_up(before: Any, added: Any, axes: AxisNames, counts: Any) -> Any:
    added = widen(added)
    total = jax.lax.psum(added if counts is None else jnp.where(counts, added, 0), axes)
    # The program stores each scalar as one element of a vector.
    start = before.reshape(added.shape)
    return (widen(start).astype(total.dtype) + total).astype(start.dtype)


def _merge_moments(
    before: Sequence[Any], after: Sequence[Any], axes: AxisNames, counts: Any
) -> list[Any]:
    """Merge the moments of parts into those of the whole (Chan, Golub and LeVeque, 1979)."""
    num, mean, squares = after
    has = num > 0 if counts is None else counts & (num > 0)
    num = jnp.where(has, num, 0)
    # A replica without rows may hold nan, and 0 * nan is nan: so select, do not multiply.
    sum_num = jax.lax.psum(num, axes)
    wide = widen(mean)
    rows = jnp.stack([num.astype(wide.dtype), jnp.where(has, wide, 0), jnp.where(has, squares, 0)])
    nums, means, devs = jnp.moveaxis(jax.lax.all_gather(rows, axes), 1, 0)  # each [R, ...]
    num0, mean0, dev0 = (x.reshape(num.shape) for x in before)
    whole = num0.astype(sum_num.dtype) + sum_num
    nums = jnp.concatenate([num0.astype(wide.dtype)[None], nums])
    means = jnp.concatenate([mean0.astype(wide.dtype)[None], means])
    devs = jnp.concatenate([dev0.astype(wide.dtype)[None], devs])
    share = nums / jnp.maximum(whole, 1).astype(wide.dtype)[None]
    # Add small corrections to the old mean: a weighted sum would lose digits in a long run.
    moved = jnp.sum(jnp.where(nums > 0, share * (means - means[:1]), 0), axis=0)
    new = jnp.where(num0 > 0, means[0] + moved, jnp.sum(share * means, axis=0))
    spread = jnp.sum(jnp.where(nums > 0, devs + nums * (means - new[None]) ** 2, 0), axis=0)
    return [whole.astype(num0.dtype), new.astype(mean0.dtype), spread.astype(dev0.dtype)]


def combine_all(
    combination: Combination,
    before: Sequence[Any],
    after: Sequence[Sequence[Any]],
    shape: Sequence[int],
    names: tuple[str, ...],
    takes_part: tuple[bool, ...] | None = None,
) -> list[Any]:
    """Apply `combine` to the values of all replicas on one device.

    Args:
        combination: The rule and the variables.
        before: Their values before the step.
        after: For each variable, the values of all replicas.
        shape: The sizes of the replica axes.
        names: The names of the replica axes.
        takes_part: For each replica, whether it has rows.
    """

    def mapped(*rows: Any) -> list[Any]:
        return combine(combination, before, rows, names, takes_part)

    # `vmap` with axis names lets the same collectives run without devices.
    for name in reversed(names):
        mapped = jax.vmap(mapped, axis_name=name)
    stacks = [jnp.stack(list(x)).reshape(*shape, *x[0].shape) for x in after]
    whole = mapped(*stacks)
    return [x.reshape(math.prod(shape), *x.shape[len(shape) :])[0] for x in whole]


# Random keys: one key between steps, one stream for each replica in a step.


def _fold_in_replica(keys: Any, axes: AxisNames) -> Any:
    """Return the keys of one replica, derived from the keys that all replicas share."""
    # `fold_in` takes one key, so it is mapped over each dim of an array of keys.
    fold = jax.random.fold_in
    for _ in range(keys.ndim if _is_typed(keys) else keys.ndim - 1):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(keys, jax.lax.axis_index(axes))


def _keys_for_next_step(before: Any, entered: Any, after: Any, axes: AxisNames) -> Any:
    """Return the keys for the next step, after the step may have assigned new ones.

    There is one variable for all replicas. So all continue with the keys of the first replica, and
    each folds its own index in again. If no replica assigned new bits, the keys stay as before.

    Cost:
        One all-reduce of the words of the keys.
    """
    new = _words(after)
    if new.shape == _words(entered).shape and after.dtype == entered.dtype:
        written = jnp.any(new != _words(entered)).astype(jnp.uint32)
    else:
        written = jnp.uint32(1)
    is_first = jax.lax.axis_index(axes) == 0
    # A sum over replicas where all but one hold 0 is a broadcast. The flag is part of the
    # same all-reduce.
    mine = jnp.where(is_first, new, 0)
    both = jax.lax.psum(jnp.concatenate([written.reshape(1), mine.reshape(-1)]), axes)
    first = both[1:].reshape(new.shape).astype(new.dtype)
    if new.shape == _words(before).shape and after.dtype == before.dtype:
        first = jnp.where(both[0] > 0, first, _words(before))
    if not _is_typed(after):
        return first
    return jax.random.wrap_key_data(first, impl=jax.random.key_impl(after))


def _words(keys: Any) -> Any:
    return jax.random.key_data(keys) if _is_typed(keys) else keys


def _is_typed(keys: Any) -> bool:
    return bool(jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key))
