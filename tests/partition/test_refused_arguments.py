"""Rules and placements refuse what they cannot place, by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jaxdist
from jaxdist import PerReplica, partition
from jaxdist.errors import ArgumentError, ArgumentTypeError, JaxdistError, ShapeError
from jaxdist.partition import ByNames, Replicate, Rules, Shard, Split
from tests.strategies.oracle import refused

TWICE = [("a/*", Split(0)), ("*/b", Split(1))]


def place(rules: Any, **options: Any) -> Any:
    """Place one matrix on 2 replicas."""
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    return partition.place(strategy, {"w": jnp.ones((4, 4))}, rules, **options)


Row = tuple[Callable[[], Any], type[JaxdistError], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "gathering a value of each replica": (
        lambda: partition.gather([jnp.ones(2), PerReplica([1.0, 2.0])]),
        ArgumentTypeError,
        ("partition.gather was given tree with PerReplica", "partition.place returned"),
    ),
    "gathering texts": (
        lambda: partition.gather({"w": "kernel"}),
        ArgumentTypeError,
        ("partition.gather was given tree=", "no leaf is an array"),
    ),
    "a filter that is none": (
        lambda: place({"w": Replicate()}, wrt=3),
        ArgumentTypeError,
        ("partition.place was given wrt=3", "wrt=nnx.Param"),
    ),
    "a dim whose name is a number": (
        lambda: ByNames({1: "replica"}),  # type: ignore[dict-item]
        ArgumentTypeError,
        ("partition.ByNames was given axes with the key 1", "names of dims"),
    ),
    "two rules for one parameter": (
        lambda: Rules(TWICE).placement_of("a/b"),
        ArgumentError,
        ("a/b", "'a/*'", "'*/b'"),
    ),
    "two rules for one activation": (
        lambda: Rules([], activations=TWICE).constrain(jnp.ones((2, 2)), "a/b"),
        ArgumentError,
        ("a/b", "'a/*'", "'*/b'"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_cannot_be_placed_is_refused_by_name(name: str) -> None:
    call, error, parts = ROWS[name]
    with refused(error, *parts) as caught:
        call()
    assert str(caught.value).count("\n\n") == 2


def test_one_dim_is_not_both_cut_and_split() -> None:
    layout = jax.make_mesh(
        (2, 2), ("replica", "logical"), (AxisType.Auto, AxisType.Auto), devices=jax.devices()[:4]
    )
    strategy = jaxdist.MirroredStrategy(mesh=layout, replica_axes=("replica",))
    # Only the rank of the parameter shows that both are dim 0.
    rule = Shard(0, split=-2, min_bytes=0)
    with refused(ShapeError, "w", "cuts and splits dim 0", "leave dim out"):
        partition.place(strategy, {"w": jnp.ones((4, 4))}, {"w": rule})
