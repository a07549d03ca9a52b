"""Values in the wrong trace: those that outlived theirs, and host values that meet one."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica, data, partition
from jaxdist.errors import ContextError, ReplicaValueError, ShapeError
from tests.tables import sampled

_MADE: dict[str, Callable[[], Any]] = {
    "many": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one": lambda: jaxdist.OneDeviceStrategy("cpu:0"),
    "virtual": lambda: jaxdist.MirroredStrategy(["cpu:0"], deterministic=2),
}


def _dead(trace: str) -> Any:
    """A traced value whose trace is over."""
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x)
        return x

    if trace == "jit":
        jax.jit(keep)(1.0)
    elif trace == "step":
        jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]).run(keep, (PerReplica([1.0, 2.0]),))
    else:
        jax.lax.scan(lambda c, x: (c, keep(x)), 0.0, jnp.ones(3))
    return kept[-1]


def _reduced_in_step(s: Any, t: Any) -> Any:
    return s.run(lambda x: jaxdist.get_replica_context().all_reduce("sum", t), (1.0,))


def _each(s: Any, t: Any) -> PerReplica:
    return PerReplica([t] * s.num_replicas_in_sync)


def _variable_of(s: Any) -> jaxdist.Variable:
    with s.scope():
        return jaxdist.Variable(1.0)


class Module(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(()))


def _module(value: Any) -> Module:
    module = Module()
    module.w.set_value(value)
    return module


def _plus_one(module: Module) -> Any:
    return module.w[...] + 1


def _run_again(call: Callable[[Module], Any], value: Any) -> Any:
    module = Module()
    call(module)
    call(module)
    module.w.set_value(value)
    return call(module)


def _eagerly(s: Any, t: Any) -> Any:
    with jaxdist.config.run_eagerly(True):
        return s.run(lambda x: x + 1, (t,))


_RULES = partition.Rules([], otherwise=partition.Replicate())
USES: dict[str, Callable[[Any, Any], Any]] = {
    "run": lambda s, t: s.run(lambda x: x + 1, (t,)),
    "run by name": lambda s, t: s.run(lambda x: x + 1, kwargs={"x": {"a": t}}),
    "run of a PerReplica": lambda s, t: s.run(lambda x: x + 1, (_each(s, t),)),
    "a closure": lambda s, t: s.run(lambda: t + 1),
    "a closure that returns it": lambda s, t: s.run(lambda: t),
    "a closure that reduces it": _reduced_in_step,
    "op by op": _eagerly,
    "lower": lambda s, t: s.lower(lambda x: x + 1, (t,)),
    "function": lambda s, t: jaxdist.function(lambda x: x + 1)(t),
    "reduce": lambda s, t: s.reduce("SUM", t, axis=None),
    "reduce to a mean": lambda s, t: s.reduce("MEAN", {"a": t}, axis=None),
    "reduce a PerReplica": lambda s, t: s.reduce("SUM", _each(s, t), axis=None),
    "gather": lambda s, t: s.gather(t, axis=0),
    "gather a PerReplica": lambda s, t: s.gather(_each(s, t), axis=0),
    "reduce_to": lambda s, t: s.extended.reduce_to("MEAN", t, "cpu:1"),
    "broadcast_to": lambda s, t: s.extended.broadcast_to(t, "cpu:1"),
    "assign": lambda s, t: jaxdist.Variable(1.0).assign(t),
    "assign_add": lambda s, t: jaxdist.Variable(1.0).assign_add(t),
    "update": lambda s, t: s.extended.update(_variable_of(s), lambda v, x: v.assign(x), (t,)),
    "a dataset": lambda s, t: [*s.experimental_distribute_dataset([{"x": t}])],
    "a dataset by function": lambda s, t: [*s.distribute_datasets_from_function(lambda _: [t])],
    "a dataset of NumPy arrays": lambda s, t: s.experimental_make_numpy_dataset({"x": t}),
    "place": lambda s, t: partition.place(s, {"w": t}, _RULES),
    "an NNX object": lambda s, t: s.run(lambda m: m.w[...] + 1, (_module(t),)),
    "an NNX object that ran before": lambda s, t: _run_again(lambda m: s.run(_plus_one, (m,)), t),
    "function of an NNX object": lambda s, t: jaxdist.function(lambda m: m.w[...] + 1)(_module(t)),
    "function that ran before": lambda s, t: _run_again(jaxdist.function(_plus_one), t),
    "data.batches": lambda s, t: data.batches({"x": t}, 1),
    "distribute_values": lambda s, t: s.experimental_distribute_values_from_function(lambda _: t),
}


DEAD = ["jit", "step", "scan"]
# Virtual replicas are refused op by op.
LEAKS = [row for row in itertools.product(USES, _MADE, DEAD) if row[:2] != ("op by op", "virtual")]


@pytest.mark.parametrize("row", sampled(LEAKS, 40, name=", ".join))
def test_a_traced_value_that_outlived_its_trace_is_named(row: tuple[str, str, str]) -> None:
    use, strategy, trace = row
    with pytest.raises(ContextError, match=r"traced|traces"):
        USES[use](_MADE[strategy](), _dead(trace))


@pytest.mark.parametrize("trace", DEAD)
def test_the_name_of_what_the_step_closes_over_is_told(trace: str) -> None:
    kept = {"loss": _dead(trace)}
    with pytest.raises(ContextError, match="through kept a traced value"):
        jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]).run(lambda: kept["loss"] * 2)


# Host values that a traced function closes over.

VALUES: dict[str, Callable[[], PerReplica]] = {
    "numbers": lambda: PerReplica([1.0, 2.0]),
    "numpy scalars": lambda: PerReplica([np.float32(1), np.float32(2)]),
    "numpy": lambda: PerReplica([np.full(3, i, np.float32) for i in (1, 2)]),
    "jax": lambda: PerReplica([jnp.full(3, i, jnp.float32) for i in (1, 2)]),
    "lists": lambda: PerReplica([[1.0] * 3, [2.0] * 3]),
    "global": lambda: PerReplica.of_global(np.repeat(np.arange(1, 3, dtype=np.float32), 3)),
}


def _total(s: Any, p: Any) -> Any:
    return s.run(lambda x: jaxdist.get_replica_context().all_reduce("sum", x), (p,)).mean()


TRACES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "jit": lambda f: jax.jit(lambda x: x * f())(1.0),
    "scan": lambda f: jax.lax.scan(lambda c, _: (c + f(), None), 0.0, length=2)[0] / 2,
    "fori_loop": lambda f: jax.lax.fori_loop(0, 2, lambda _, c: c + f(), 0.0) / 2,
    "while_loop": lambda f: jax.lax.while_loop(lambda c: c < 1, lambda c: c + f(), 0.0),
    "cond": lambda f: jax.jit(lambda q: jax.lax.cond(q, f, lambda: 0.0))(True),
    "function": lambda f: jaxdist.function(lambda x: x * f())(1.0),
    "grad": lambda f: jax.grad(lambda x: x * f())(1.0),
    "vmap": lambda f: jax.vmap(lambda x: x * f())(jnp.ones(2))[0],
}


MET = list(itertools.product(VALUES, TRACES, ["run", "reduce"]))


@pytest.mark.parametrize("row", sampled(MET, 24, name=", ".join))
def test_host_values_that_a_traced_function_closes_over_are_what_they_are_outside(
    row: tuple[str, str, str],
) -> None:
    value, trace, way = row
    s, p = _MADE["many"](), VALUES[value]()
    uses = {"run": lambda: _total(s, p), "reduce": lambda: s.reduce("SUM", p, axis=None).mean()}
    assert float(TRACES[trace](uses[way])) == 3.0


@pytest.mark.parametrize("trace", [t for t in TRACES if t not in ("grad", "vmap")])
def test_values_of_different_shapes_in_a_trace_are_an_error_that_says_so(trace: str) -> None:
    s, p = _MADE["many"](), PerReplica([np.ones(3), np.ones(2)])
    with pytest.raises(ShapeError, match=r"args\[0\] is a PerReplica whose values differ in shape"):
        TRACES[trace](lambda: s.run(lambda x: x.sum(), (p,)).array.sum())


def test_a_step_that_returns_what_it_closes_over_is_told_the_value() -> None:
    s = _MADE["many"]()
    p = s.run(lambda x: x, (PerReplica([1.0, 2.0]),))
    with pytest.raises(ReplicaValueError, match=r"PerReplica\(1\.0, 2\.0\)"):
        s.run(lambda: p)
