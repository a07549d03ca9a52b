"""State that would come out different on each replica is refused before it is computed."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica, RunOptions, get_replica_context
from jaxdist.errors import StateDivergenceError, StateDivergenceWarning

X = PerReplica(np.arange(8, dtype=np.float32))


def _params() -> dict[str, Any]:
    return {"w": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}


@flax.struct.dataclass
class TrainState:
    """State as flax.training makes it."""

    params: Any
    step: Any


def _assert_names_and_remedy(error: Any, *names: str) -> None:
    text = str(error.value)
    for name in names:
        assert name in text, text
    assert "All-reduce the gradients first" in text
    assert "8 replicas" in text


def test_a_train_state_that_forgot_the_all_reduce_is_refused_naming_the_parameter() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(state: Any, x: Any) -> Any:
        params = {"w": state.params["w"] - x, "b": state.params["b"]}
        return state.replace(params=params, step=state.step + 1), x

    with pytest.raises(StateDivergenceError) as error:
        strategy.run(step, (TrainState(_params(), 0), X))
    _assert_names_and_remedy(error, "args[0].params['w']")
    assert "['b']" not in str(error.value)


def test_optimizer_state_that_differs_is_refused_naming_the_moment() -> None:
    strategy = jaxdist.MirroredStrategy()
    tx = optax.adam(0.1)
    params = _params()

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = jax.tree.map(lambda p: p * x, params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    with pytest.raises(StateDivergenceError) as error:
        strategy.run(step, (params, tx.init(params), X))
    _assert_names_and_remedy(error, "args[0]['w']", "args[1][0].mu['w']", "args[1][0].nu['b']")


def test_a_donated_dict_that_differs_is_refused() -> None:
    strategy = jaxdist.MirroredStrategy()
    with pytest.raises(StateDivergenceError) as error:
        strategy.run(
            lambda p, x: jax.tree.map(lambda v: v - x, p),
            (_params(), X),
            options=RunOptions(donate_argnums=(0,)),
        )
    _assert_names_and_remedy(error, "args[0]['w']", "args[0]['b']")


def test_an_nnx_module_that_differs_is_refused_and_keeps_its_values() -> None:
    strategy = jaxdist.MirroredStrategy()
    model: Any = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before = np.asarray(model.kernel[...])

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        grads = nnx.grad(lambda m: jnp.mean(m(x[None, None]) ** 2))(model)
        optimizer.update(model, grads)

    with pytest.raises(StateDivergenceError) as error:
        strategy.run(step, (model, optimizer, X))
    _assert_names_and_remedy(error, ".kernel", ".bias")
    np.testing.assert_array_equal(model.kernel[...], before)
    assert int(optimizer.step[...]) == 0


def test_a_plain_dict_that_comes_back_different_is_a_warning_naming_file_and_leaf() -> None:
    strategy = jaxdist.MirroredStrategy()

    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p: p - x, params)

    with pytest.warns(StateDivergenceWarning) as record:
        result = strategy.run(step, (_params(), X))
    assert len(record) == 1
    text = str(record[0].message)
    assert "args[0]['w']" in text
    assert f"{__file__}:{step.__code__.co_firstlineno}" in text
    assert "filterwarnings" in text
    assert isinstance(result["w"], PerReplica)


def test_chains_of_dicts_that_are_no_state_say_nothing() -> None:
    strategy = jaxdist.MirroredStrategy()
    data = jax.device_put(np.ones((16, 2), np.float32), strategy.per_replica_sharding)

    first = strategy.run(
        lambda d: {"image": d["image"] / 2, "label": d["label"]}, ({"image": data, "label": data},)
    )
    second = strategy.run(lambda d: {"image": d["image"] + 1, "label": -d["label"]}, (first,))
    third = strategy.run(lambda d: {"image": d["image"].sum(), "n": d["label"].size}, (second,))
    assert isinstance(third["image"], PerReplica)
    strategy.run(
        lambda d: {"a": d["a"] + get_replica_context().replica_id_in_sync_group},
        ({"a": np.float32(1)},),
    )
    strategy.run(lambda p, d: {"loss": p["w"].sum() * d["image"].sum()}, (_params(), first))


def test_reduced_updates_and_promises_say_nothing() -> None:
    strategy = jaxdist.MirroredStrategy()

    def reduced(state: Any, x: Any) -> Any:
        mean = get_replica_context().all_reduce("mean", x)
        return state.replace(params=jax.tree.map(lambda p: p - mean, state.params))

    def promised(state: Any, x: Any) -> Any:
        same = jaxdist.assume_replicated(x * 0)
        return state.replace(params=jax.tree.map(lambda p: p - same, state.params))

    for step in (reduced, promised):
        state = strategy.run(step, (TrainState(_params(), 0), X))
        assert isinstance(state.params["w"], jax.Array)


def test_one_replica_cannot_diverge() -> None:
    strategy = jaxdist.OneDeviceStrategy("cpu:0")
    state = strategy.run(
        lambda s, x: s.replace(step=s.step + x), (TrainState(_params(), 0.0), np.float32(2))
    )
    assert float(state.step) == 2


STATE = {
    "params": (np.ones(2, np.float32), "All-reduce the gradients first"),
    "batch_stats": (np.ones(2, np.float32), "Average the statistics"),
    "accuracy": (np.float32(0), "Add up what each replica saw"),
    "num_seen": (np.int32(0), "Count for all replicas together"),
    "dropout_key": (jax.random.key(0), "Return a key that is the same on all replicas"),
}


def _changed(name: str, leaf: Any) -> Any:
    number = get_replica_context().replica_id_in_sync_group
    return jax.random.fold_in(leaf, number) if name == "dropout_key" else leaf + number


@pytest.mark.parametrize("name", STATE)
def test_the_remedy_fits_the_kind_of_state(name: str) -> None:
    def step(state: Any) -> Any:
        return state.replace(params={k: _changed(k, v) for k, v in state.params.items()})

    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    value, advice = STATE[name]
    with pytest.raises(StateDivergenceError, match=name) as error:
        strategy.run(step, (TrainState({name: value}, 0),))
    assert advice in str(error.value)
    assert sum(other in str(error.value) for _, other in STATE.values()) == 1


def test_state_of_several_kinds_has_a_remedy_for_each() -> None:
    def step(state: Any) -> Any:
        return state.replace(params={k: _changed(k, v) for k, v in state.params.items()})

    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    state = TrainState({name: value for name, (value, _) in STATE.items()}, 0)
    with pytest.raises(StateDivergenceError) as error:
        strategy.run(step, (state,))
    for name, (_, advice) in STATE.items():
        assert name in str(error.value)
        assert advice in str(error.value)


def test_integer_statistics_that_differ_are_refused_and_floats_do_not_overflow() -> None:
    class Statistics(nnx.Module):
        def __init__(self, value: Any) -> None:
            self.value = nnx.BatchStat(jnp.asarray(value))

    def step(model: Any, x: Any) -> None:
        model.value.set_value(x.astype(model.value.dtype))

    strategy = jaxdist.MirroredStrategy()
    with pytest.raises(StateDivergenceError, match="integers have no exact mean"):
        strategy.run(step, (Statistics(np.int32(0)), PerReplica(list(range(8)))))
    model = Statistics(np.float32(0))
    strategy.run(step, (model, PerReplica([np.float32(3e38)] * 8)))
    np.testing.assert_allclose(model.value.get_value(), 3e38, rtol=1e-6)
