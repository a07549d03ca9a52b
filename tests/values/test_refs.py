"""A `jax.Ref` where an array is expected is a named error that says how to pass its value."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist import partition
from jaxdist.errors import ArgumentTypeError
from jaxdist.training import Checkpoints


def _variable() -> Any:
    with jaxdist.get_strategy().scope():
        return jaxdist.Variable(jnp.ones((2, 3)), name="v")


def _assign_in_step(strategy: Any, ref: Any) -> Any:
    with strategy.scope():
        variable = jaxdist.Variable(jnp.ones((2, 3)))
    return strategy.run(lambda: variable.assign(ref))


def _in_step(use: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda strategy, ref: strategy.run(lambda: use(ref))


def _collective(name: str, *first: Any) -> Callable[[Any, Any], Any]:
    return _in_step(lambda ref: getattr(jaxdist.get_replica_context(), name)(*first, {"a": ref}))


WAYS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "gather": (lambda s, ref: s.gather(ref, 0), "value, "),
    "gather of a pytree": (lambda s, ref: s.gather({"a": ref}, 0), r"value\['a'\]"),
    "reduce": (lambda s, ref: s.reduce("SUM", ref, axis=None), "value, "),
    "reduce of rows": (lambda s, ref: s.reduce("MEAN", {"a": ref}, axis=0), r"value\['a'\]"),
    "broadcast_to": (lambda s, ref: s.extended.broadcast_to(ref, _variable()), "tensor="),
    "all_reduce": (_collective("all_reduce", "sum"), r"value\['a'\]"),
    "all_gather": (
        _in_step(lambda ref: jaxdist.get_replica_context().all_gather({"a": ref}, 0)),
        r"value\['a'\]",
    ),
    "all_reduce of a list": (
        _in_step(lambda ref: jaxdist.get_replica_context().all_reduce("mean", [ref])),
        r"value\[0\]",
    ),
    "a new variable": (lambda s, ref: jaxdist.Variable(ref), "initial_value"),
    "assign": (lambda s, ref: _variable().assign(ref), "value, "),
    "assign_add": (lambda s, ref: _variable().assign_add(ref), "delta, "),
    "assign in a step": (_assign_in_step, "value, "),
    "place": (lambda s, ref: partition.place(s, {"w": ref}, partition.replicated()), "w, "),
    "place beside an array": (
        lambda s, ref: partition.place(s, {"a": jnp.ones(2), "w": ref}, partition.replicated()),
        "w, ",
    ),
    "a result of a function": (lambda s, ref: jaxdist.function(lambda: {"a": ref})(), r"\['a'\]"),
    "slices": (lambda s, ref: jaxdist.IndexedSlices(ref, jnp.arange(2), (4, 3)), "values, "),
    "pieces": (lambda s, ref: jaxdist.Sharded(ref, 0, 2), "array, "),
    "values of replicas": (lambda s, ref: jaxdist.PerReplica([ref, ref]), "values="),
    "from a function": (
        lambda s, ref: s.experimental_distribute_values_from_function(lambda context: ref),
        "values=",
    ),
    "assume_replicated": (lambda s, ref: jaxdist.assume_replicated(ref), "value="),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", WAYS)
def test_a_ref_is_refused_by_name(name: str) -> None:
    call, says = WAYS[name]
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    ref = jax.new_ref(jnp.ones((2, 3)))
    with pytest.raises(ArgumentTypeError, match=says):
        call(strategy, ref)
    assert ref[...].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_ref_in_a_checkpoint_is_refused_and_nothing_is_written(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ArgumentTypeError, match=r"state\['a'\], a jax.Ref(.|\n)*ref\[...\]"):
            checkpoints.save(1, {"a": jax.new_ref(jnp.ones(2))})
        assert checkpoints.steps() == ()
