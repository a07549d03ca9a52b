"""The rules that place the state of a task: those of its partition, on the axes of the strategy."""

import dataclasses
from typing import Any

from jaxdist import partition
from jaxdist._planning import LOGICAL
from jaxdist.errors import ConfigError
from jaxdist.jobs._config.schema import StrategyConfig, list_inner_axes
from jaxdist.jobs._partitions import PARTITIONS, WITHIN, Partition, list_like

_EXPERTS = "experts"


def make_rules(asked: StrategyConfig, *, stack: str, experts: str) -> partition.Rules:
    """Return the rules of a configured strategy.

    Args:
        asked: The strategy.
        stack: The pattern of the parameters of stacked layers.
        experts: The pattern of the parameters of experts.

    Example:
        >>> asked = StrategyConfig(positions=4, stages=2, partition="tensor_parallel")
        >>> rules = make_rules(asked, stack="layers/**", experts="")
        >>> rules.placement_of("layers/mlp/up/kernel")
        Stage(of=Split(dim=1, axis='logical'))
    """
    placed, inner = PARTITIONS[asked.partition], list_inner_axes(asked)
    rules = placed.make_rules(asked.whole_below)
    # Splits without an axis are over all devices of a replica, and those of stages are left out.
    if placed.is_split and inner.keys() - {"stage"}:
        rules = _over_axis(rules, LOGICAL)
    if asked.experts > 1:
        if placed.is_split:
            raise ConfigError(
                f"strategy.partition is {asked.partition!r}, and strategy.experts is "
                f"{asked.experts}.\n\nA partition that splits kernels does not divide experts."
                f"\n\nSet strategy.partition to {' or '.join(_list_whole(asked))}."
            )
        rules = _make_rules_of_experts(placed, asked.whole_below, experts)
    if asked.stages > 1:
        rules = rules.on_stages(stack, chunks=asked.chunks)
    return rules


def _list_whole(asked: StrategyConfig) -> list[str]:
    return [repr(name) for name in list_like(asked.partition, is_split=False)]


def _over_axis(rules: partition.Rules, axis: str) -> partition.Rules:
    """Return the rules with each split over one axis."""

    def of(placement: Any) -> Any:
        if isinstance(placement, partition.Split):
            return dataclasses.replace(placement, axis=axis)
        if isinstance(placement, partition.Shard) and placement.split is not None:
            return dataclasses.replace(placement, split_axis=axis)
        return placement

    pairs = [(pattern, of(placement)) for pattern, placement in rules.rules]
    return partition.Rules(pairs, of(rules.otherwise), must_match=rules.must_match)


def _make_rules_of_experts(placed: Partition, least: int, pattern: str) -> partition.Rules:
    """Return rules that divide experts over their axis, and shard everything as the partition."""
    if not placed.is_sharded:
        return partition.Rules(
            [(pattern, partition.Split(0, axis=_EXPERTS))], otherwise=partition.Replicate()
        )
    axes = WITHIN if placed.is_in_slice else None
    whole = partition.Shard(axes=axes, min_bytes=least)
    divided = dataclasses.replace(whole, split=0, split_axis=_EXPERTS)
    return partition.Rules([(pattern, divided)], otherwise=whole)
