"""What becomes of NNX state in a step: every kind, dtype and special value, in every executor."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import ArgumentTypeError, StateDivergenceError
from jaxdist.training import multi_step
from tests.tables import sampled


def _cpus(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run a step on four replicas."""

    name: str
    deterministic: int | None = None
    eagerly: bool = False
    rows: tuple[int, ...] = (2, 2, 2, 2)
    in_scan: bool = False
    inside_jit: bool = False

    def strategy(self) -> jaxdist.Strategy:
        return (
            jaxdist.MirroredStrategy(_cpus(2), deterministic=self.deterministic)
            if self.deterministic
            else jaxdist.MirroredStrategy(_cpus(4))
        )

    def running(self) -> contextlib.AbstractContextManager[None]:
        return jaxdist.config.run_eagerly() if self.eagerly else contextlib.nullcontext()


WAYS = (
    Way("compiled"),
    Way("op by op", eagerly=True),
    Way("virtual", deterministic=4),
    Way("uneven", rows=(3, 2, 2, 1)),
    Way("without rows", rows=(4, 3, 1, 0)),
    Way("op by op without rows", eagerly=True, rows=(4, 3, 1, 0)),
    Way("in a scan", in_scan=True),
)


class Holder(nnx.Module):
    """One variable, and nothing else."""

    def __init__(self, variable: Any) -> None:
        self.v = variable


def _given(way: Way, rows: np.ndarray) -> PerReplica:
    ends = np.cumsum((0, *way.rows))
    return PerReplica([rows[a:b] for a, b in itertools.pairwise(ends)])


def _added(node: Any, x: Any) -> tuple[Any, None]:
    node.v[...] = node.v[...] + x.sum(dtype=node.v.dtype)
    return node, None


def _step(way: Way, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    """A step that returns nothing; in a scan it is done once."""

    def run(node: Any, x: Any) -> None:
        multi_step(step)(node, [x]) if way.in_scan else step(node, x)

    return run


# A metric is what it was, plus what all replicas add

BEFORE: dict[str, Callable[[Any], Any]] = {
    "zero": lambda dtype: 0,
    "inf": lambda dtype: np.inf,
    "minus inf": lambda dtype: -np.inf,
    "nan": lambda dtype: np.nan,
    "2**24": lambda dtype: 2**24,
    "largest": lambda dtype: (
        ml_dtypes.finfo(dtype).max if dtype.kind in "fV" else np.iinfo(dtype).max
    ),
}
DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "int8")


def _sums() -> list[tuple[str, str, Way]]:
    return [
        (dtype, before, way)
        for dtype, before, way in itertools.product(DTYPES, BEFORE, WAYS)
        if "int" not in dtype
        or before in ("zero", "largest")
        or (before, dtype[-2:]) == ("2**24", "32")
    ]


def _name_of(row: Any) -> str:
    return "-".join(x.name if isinstance(x, Way) else str(x) for x in row).replace(" ", "_")


@pytest.mark.parametrize("row", sampled(_sums(), 12, name=_name_of))
def test_a_metric_grows_by_the_sum_of_what_all_replicas_add(row: Any) -> None:
    name, special, way = row
    dtype = jnp.dtype(name)
    with np.errstate(over="ignore"):
        before = np.asarray(BEFORE[special](dtype)).astype(dtype)
    rows = np.ones(sum(way.rows), dtype)
    holder = Holder(nnx.metrics.MetricState(jnp.asarray(before)))
    strategy, step = way.strategy(), _step(way, _added)
    expected = before
    with way.running(), np.errstate(all="ignore"):
        for _ in range(2):
            strategy.run(step, (holder, _given(way, rows)))
            wide = np.float64 if dtype.kind in "fV" else dtype
            expected = (expected.astype(wide) + rows.astype(wide).sum(dtype=wide)).astype(dtype)
    np.testing.assert_array_equal(
        np.asarray(holder.v[...]).astype(np.float64), expected.astype(np.float64)
    )
    assert holder.v.dtype == dtype


@pytest.mark.parametrize("way", sampled(WAYS, 2, name=lambda way: way.name))
def test_a_metric_that_is_read_in_the_step_is_seen_as_it_is_and_grows_right(way: Way) -> None:
    metric: Any = nnx.metrics.Average()
    metric.update(values=jnp.asarray([1e8, 2.0], jnp.float32))
    seen = float(metric.compute())

    def step(metric: Any, x: Any) -> Any:
        came_in = metric.compute()
        metric.update(values=x)
        return came_in

    with way.running():
        found = way.strategy().run(step, (metric, _given(way, np.ones(8, np.float32))))
    assert float(found) == pytest.approx(seen)
    assert float(metric.total[...]) == np.float32(np.float32(1e8) + 8)
    assert int(metric.count[...]) == 10


class _Two(nnx.Module):
    """Two metric variables and a weight."""

    def __init__(self) -> None:
        self.total = nnx.metrics.MetricState(jnp.float32(10))
        self.other = nnx.metrics.MetricState(jnp.float32(5))
        self.weight = nnx.Variable(jnp.float32(3))


def _add(two: Any, total: Any, other: Any = 0.0) -> None:
    two.total[...], two.other[...] = two.total[...] + total, two.other[...] + other


OF_ANOTHER: dict[str, Callable[[Any, Any], None]] = {
    "the new value": lambda two, x: _add(two, two.other[...] + x.sum(), x.sum()),
    "the old value": lambda two, x: _add(two, two.other[...] * x.sum(), x.sum()),
    "a value that stays": lambda two, x: _add(two, two.other[...] + x.sum()),
    "a branch": lambda two, x: _add(two, jnp.where(two.other[...] > 4, x.sum(), 0.0), x.sum()),
    "a loop": lambda two, x: _add(
        two, jax.lax.fori_loop(0, 3, lambda i, y: y + two.other[...], x.sum()), x.sum()
    ),
}


@pytest.mark.parametrize(
    "row",
    sampled([*itertools.product(OF_ANOTHER, WAYS)], 8, name=_name_of),
)
def test_a_metric_to_which_a_step_adds_what_another_holds_is_refused(row: Any) -> None:
    what, way = row
    two = _Two()

    def step(two: Any, x: Any) -> tuple[Any, None]:
        OF_ANOTHER[what](two, x)
        return two, None

    with (
        way.running(),
        pytest.raises(StateDivergenceError, match=r"args\[0\]\.total.*args\[0\]\.other"),
    ):
        way.strategy().run(_step(way, step), (two, _given(way, np.ones(8, np.float32))))
    assert float(two.total[...]) == 10
    assert float(two.other[...]) == 5


@pytest.mark.parametrize("way", sampled(WAYS, 3, name=lambda way: way.name))
def test_a_metric_may_grow_by_what_is_computed_with_other_state(way: Way) -> None:
    two = _Two()

    def step(two: Any, x: Any) -> tuple[Any, None]:
        _add(two, (two.weight[...] * x).sum(), x.sum())
        return two, None

    with way.running():
        way.strategy().run(_step(way, step), (two, _given(way, np.arange(8, dtype=np.float32))))
    assert float(two.total[...]) == 10 + 3 * 28
    assert float(two.other[...]) == 5 + 28


@pytest.mark.parametrize("way", sampled(WAYS, 3, name=lambda way: way.name))
def test_mean_and_deviation_are_those_of_one_device(way: Way) -> None:
    metrics: Any = nnx.MultiMetric(spread=nnx.metrics.Welford("x"), mean=nnx.metrics.Average("x"))
    one: Any = nnx.metrics.Welford("x")
    strategy, random = way.strategy(), np.random.default_rng(0)

    def update(metrics: Any, x: Any) -> tuple[Any, None]:
        metrics.update(x=x)
        metrics.update(x=2 * x)
        return metrics, None

    step, seen = _step(way, update), []
    with way.running():
        for _ in range(3):
            rows = (100 + random.normal(size=8)).astype(np.float32)
            seen += [rows, 2 * rows]
            strategy.run(step, (metrics, _given(way, rows)))
            one.update(x=rows)
            one.update(x=2 * rows)
    found, of_one = metrics.compute()["spread"], one.compute()
    whole = np.concatenate(seen).astype(np.float64)
    assert int(metrics.spread.count[...]) == whole.size
    for value, same, exact in (
        (found.mean, of_one.mean, whole.mean()),
        (found.standard_deviation, of_one.standard_deviation, whole.std()),
    ):
        assert float(value) == pytest.approx(exact, rel=1e-4)
        assert float(value) == pytest.approx(float(same), rel=1e-4)


@pytest.mark.parametrize("name", ["decayed", "clipped", "count alone", "mean by hand"])
def test_moments_that_are_not_only_updated_are_refused_by_name(name: str) -> None:
    def step(metric: Any, x: Any) -> None:
        if name == "decayed":
            metric.mean[...] = metric.mean[...] * 0.9
        if name == "count alone":
            metric.count[...] = metric.count[...] + 1
        if name == "mean by hand":
            metric.mean[...] = x.mean()
        metric.update(values=x)
        if name == "clipped":
            metric.mean[...] = jnp.clip(metric.mean[...], -10.0, 10.0)

    metric: Any = nnx.metrics.Welford()
    with pytest.raises(StateDivergenceError, match=r"args\[0\]\.mean"):
        jaxdist.MirroredStrategy(_cpus(4)).run(
            step, (metric, _given(WAYS[0], np.ones(8, np.float32)))
        )
    assert int(metric.count[...]) == 0


# Batch statistics, and state without a rule


@pytest.mark.parametrize("way", sampled(WAYS, 3, name=lambda way: way.name))
def test_batch_statistics_are_the_mean_over_the_replicas_that_have_rows(way: Way) -> None:
    holder = Holder(nnx.BatchStat(jnp.float32(1)))

    def update(node: Any, x: Any) -> tuple[Any, None]:
        node.v[...] = 0.5 * node.v[...] + 0.5 * x.mean()
        return node, None

    rows = np.arange(8, dtype=np.float32)
    given = _given(way, rows)
    with way.running():
        way.strategy().run(_step(way, update), (holder, given))
    local = [0.5 + 0.5 * np.mean(x) for x in given.values if len(x)]
    assert float(holder.v[...]) == pytest.approx(np.mean(local))


class Own(nnx.Variable[Any]):
    """A kind of the user's own."""


KINDS = (nnx.Param, nnx.Cache, nnx.Intermediate, nnx.Perturbation, nnx.Variable, Own, nnx.OptState)


@pytest.mark.parametrize(
    "row",
    sampled(list(itertools.product(KINDS, WAYS)), 5, name=lambda r: f"{r[0].__name__}-{r[1].name}"),
)
def test_state_without_a_rule_is_written_where_it_is_equal_and_refused_elsewhere(row: Any) -> None:
    kind, way = row
    holder, given = Holder(kind(jnp.float32(1))), _given(way, np.ones(8, np.float32))
    strategy = way.strategy()

    def equal(node: Any, x: Any) -> tuple[Any, None]:
        total = jaxdist.get_replica_context().all_reduce("sum", x.sum())
        node.v[...] = node.v[...] + total
        return node, None

    with way.running():
        strategy.run(_step(way, equal), (holder, given))
        assert float(holder.v[...]) == 9
        with pytest.raises(StateDivergenceError) as error:
            strategy.run(_step(way, _added), (holder, given))
    assert float(holder.v[...]) == 9
    assert f"args[0].v ({kind.__name__})" in str(error.value)
    is_trained = kind in (nnx.Param, nnx.OptState)
    assert ("gradients" in str(error.value)) is is_trained


# Random streams


def _numbers(drawn: Any) -> list[bytes]:
    values = drawn.values if isinstance(drawn, PerReplica) else [drawn]
    return [np.asarray(v).tobytes() for v in values]


def _writes_a_drawn_key(rngs: Any, x: Any) -> None:
    rngs.default.key[...] = rngs.default()


def _writes_and_starts_again(rngs: Any, x: Any) -> None:
    rngs.default.key[...] = jax.random.split(rngs.default())[0]
    rngs.default.count[...] = jnp.zeros_like(rngs.default.count[...])


def _seeds_by_an_argument(rngs: Any, x: Any) -> None:
    nnx.reseed(rngs, default=jax.random.fold_in(jax.random.key(3), x[0].astype(jnp.int32)))


def _forks(rngs: Any, x: Any) -> None:
    rngs.fork()


def _writes_on_one_replica(rngs: Any, x: Any) -> None:
    number = jaxdist.get_replica_context().replica_id_in_sync_group
    new = rngs.default()
    old = rngs.default.key[...]
    chosen = jnp.where(number == 2, jax.random.key_data(new), jax.random.key_data(old))
    rngs.default.key[...] = jax.random.wrap_key_data(chosen)


WRITERS = (
    _writes_a_drawn_key,
    _writes_and_starts_again,
    _seeds_by_an_argument,
    _forks,
    _writes_on_one_replica,
)


@pytest.mark.parametrize(
    "row",
    sampled(
        list(itertools.product(WRITERS, [w for w in WAYS if min(w.rows)])),
        5,
        name=lambda r: f"{r[0].__name__}-{r[1].name}",
    ),
)
def test_no_random_number_comes_twice_where_a_step_writes_keys(row: Any) -> None:
    write, way = row
    rngs: Any = nnx.Rngs(0)
    strategy, seen = way.strategy(), []

    def drawing(rngs: Any, x: Any) -> tuple[Any, Any]:
        first = jax.random.normal(rngs(), (4,))
        write(rngs, x)
        return rngs, jnp.stack([first, jax.random.normal(rngs(), (4,))])

    def step(rngs: Any, x: Any) -> Any:
        return multi_step(drawing)(rngs, [x])[1][0] if way.in_scan else drawing(rngs, x)[1]

    with way.running():
        for i in range(3):
            x = _given(way, np.arange(8 * i, 8 * i + 8, dtype=np.float32))
            for row_of in strategy.run(step, (rngs, x)).values:
                seen += [np.asarray(row_of[0]).tobytes(), np.asarray(row_of[1]).tobytes()]
    assert len(set(seen)) == len(seen) == 24


def test_a_key_that_is_seeded_again_is_the_one_that_stays() -> None:
    plain: Any = nnx.Rngs(0)
    nnx.reseed(plain, default=7)
    for strategy in (jaxdist.OneDeviceStrategy("cpu:0"), jaxdist.MirroredStrategy(_cpus(4))):
        rngs: Any = nnx.Rngs(0)
        rngs()
        strategy.run(lambda rngs: nnx.reseed(rngs, default=7), (rngs,))
        assert rngs.default.key[...] == plain.default.key[...]
        assert int(rngs.default.count[...]) == 0


def test_keys_that_are_written_under_a_condition_stay_as_they_were_until_then() -> None:
    rngs: Any = nnx.Rngs(0)
    before = rngs.default.key[...]

    def step(rngs: Any, again: Any) -> None:
        key = jax.random.key_data(rngs.default.key[...])
        new = jax.random.key_data(jax.random.key(5))
        rngs.default.key[...] = jax.random.wrap_key_data(jnp.where(again, new, key))

    strategy = jaxdist.MirroredStrategy(_cpus(4))
    strategy.run(step, (rngs, np.bool_(False)))
    assert rngs.default.key[...] == before
    strategy.run(step, (rngs, np.bool_(True)))
    assert rngs.default.key[...] == jax.random.key(5)


def test_a_step_that_only_draws_has_no_collective_for_its_keys() -> None:
    strategy = jaxdist.MirroredStrategy(_cpus(4))
    model: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    program = strategy.lower(lambda m, x: m(x), (model, _given(WAYS[0], np.ones(8, np.float32))))
    assert program.traced_collectives == ()


@pytest.mark.parametrize("way", sampled(WAYS, 2, name=lambda way: way.name))
def test_streams_that_some_replicas_draw_more_from_go_on_after_the_last_number(way: Way) -> None:
    rngs: Any = nnx.Rngs(0)

    def draw(rngs: Any, x: Any) -> tuple[Any, None]:
        number = jaxdist.get_replica_context().replica_id_in_sync_group
        rngs.default.count[...] += jnp.asarray(number, jnp.uint32)
        return rngs, None

    with way.running():
        way.strategy().run(_step(way, draw), (rngs, _given(way, np.ones(8, np.float32))))
    assert int(rngs.default.count[...]) == 3


# What is beside the variables


class Configured(nnx.Module):
    """A module with plain attributes."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.w = nnx.Param(jnp.ones(()))


@pytest.mark.parametrize("way", WAYS[:3], ids=lambda way: way.name)
def test_a_dict_attribute_is_part_of_the_program_and_changes_are_seen(way: Way) -> None:
    strategy = way.strategy()
    model: Any = Configured({"width": 3, "inner": {"sizes": [1, 2]}, "names": {"a"}})

    def step(model: Any) -> Any:
        config = model.config
        return model.w * (config["width"] + 10 * sum(config["inner"]["sizes"]))

    with way.running():
        assert float(strategy.run(step, (model,))) == 33
        model.config["width"] = 4
        assert float(strategy.run(step, (model,))) == 34
        model.config["inner"]["sizes"].append(5)
        assert float(strategy.run(step, (model,))) == 84
        model.config = {"width": 3, "inner": {"sizes": [1, 2]}}
        assert float(strategy.run(step, (model,))) == 33


def test_attributes_are_equal_only_with_type_and_bits() -> None:
    strategy = jaxdist.MirroredStrategy(_cpus(2))
    model: Any = Configured(None)

    def step(model: Any) -> Any:
        config = model.config
        return jnp.asarray(config[0] if isinstance(config, tuple) else config)

    for value in (1, True, 1.0, 0.0, -0.0, (1,), (True,), 1, 0.0):
        model.config = value
        found, plain = strategy.run(step, (model,)), step(model)
        assert found.dtype == plain.dtype
        assert np.asarray(found).tobytes() == np.asarray(plain).tobytes()


def test_an_attribute_that_cannot_be_hashed_is_named() -> None:
    @dataclasses.dataclass
    class Settings:
        width: int

    with pytest.raises(ArgumentTypeError, match="'config'"):
        jaxdist.MirroredStrategy(_cpus(2)).run(lambda m: m.w[...], (Configured(Settings(3)),))


def test_layers_in_a_dict_are_updated_in_place() -> None:
    strategy = jaxdist.MirroredStrategy(_cpus(2))
    layers = {"a": nnx.Param(jnp.ones(())), "b": {"c": nnx.Param(jnp.zeros(2))}}
    model: Any = Configured(nnx.data(layers))

    def step(model: Any) -> None:
        model.config["a"][...] += 1
        model.config["b"]["c"][...] += 2

    for _ in range(2):
        strategy.run(step, (model,))
    assert float(model.config["a"][...]) == 3
    assert model.config["b"]["c"][...].tolist() == [4, 4]


def test_a_variable_that_holds_a_pytree_is_updated_and_may_change_its_structure_between() -> None:
    strategy = jaxdist.MirroredStrategy(_cpus(2))
    holder = Holder(nnx.Intermediate((jnp.zeros(2), {"a": jnp.ones(())})))

    def step(node: Any) -> None:
        node.v.set_value(jax.tree.map(lambda x: x + 1, node.v.get_value()))

    for _ in range(2):
        strategy.run(step, (holder,))
    first, second = holder.v.get_value()
    assert first.tolist() == [2, 2]
    assert float(second["a"]) == 3
    holder.v.set_value((jnp.zeros(3),))
    strategy.run(step, (holder,))
    assert holder.v.get_value()[0].tolist() == [1, 1, 1]


def test_changing_the_keys_of_a_variables_value_is_refused() -> None:
    holder = Holder(nnx.Intermediate([jnp.zeros(2), jnp.ones(2)]))

    def swap(node: Any) -> None:
        first, second = node.v.get_value()
        node.v.set_value(nnx.State({0: first, 2: second}))

    with pytest.raises(StateDivergenceError, match="changed the structure"):
        jaxdist.MirroredStrategy(_cpus(2)).run(swap, (holder,))
    assert [x.tolist() for x in holder.v.get_value()] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("way", sampled(WAYS[:-1], 2, name=lambda way: way.name))
def test_an_optimizer_whose_state_holds_lists_trains_as_flax_does(way: Way) -> None:
    # nnx.Optimizer replaces each list that sm3 keeps by an nnx.State.
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

    def made() -> tuple[Any, Any]:
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sm3(0.1), wrt=nnx.Param)

    def update(model: Any, optimizer: Any, x: Any, count: Any, total: Any) -> None:
        gradients = nnx.grad(lambda m: (m(x) ** 2).sum() / count)(model)
        optimizer.update(model, total(gradients))

    def step(both: Any, x: Any) -> tuple[Any, None]:
        context = jaxdist.get_replica_context()
        update(both[0], both[1], x, 8, lambda g: context.all_reduce("sum", g))
        return both, None

    wanted, found = made(), made()
    both = nnx.List(found)
    strategy, run = way.strategy(), _step(way, step)
    with way.running():
        for _ in range(3):
            update(*wanted, x, 8, lambda g: g)
            strategy.run(run, (both, _given(way, x)))
    for a, b in zip(
        jax.tree.leaves(nnx.state(found)), jax.tree.leaves(nnx.state(wanted)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert isinstance(found[1].opt_state[0].mu.kernel.get_value(), list)
