"""Checkpoints in two calls: models, optimizers and variables, saved and restored in place."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import partition
from jaxdist.errors import ArgumentTypeError, CheckpointError, DamagedCheckpointError
from jaxdist.training import Checkpoints


class Net(nnx.Module):
    """A bit of everything that has state."""

    def __init__(self, seed: int, width: int = 3) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(2, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)])
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.layers[1](self.drop(self.norm(self.layers[0](x))))


def _made(seed: int) -> tuple[Net, Any, nnx.MultiMetric]:
    model = Net(seed)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def _step(model: Net, optimizer: Any, metrics: Any) -> float:
    x = jnp.arange(8.0).reshape(4, 2)
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return float(loss)


def _bits(objects: Any) -> list[bytes]:
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(objects)))
    raw = (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    )
    return [np.asarray(x).tobytes() for x in raw]


def test_a_loop_with_two_calls_goes_on_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole = _made(0)
    losses = [_step(*whole) for _ in range(4)]
    first = _made(0)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(first) is None
        assert [_step(*first) for _ in range(2)] == losses[:2]
        checkpoints.save(2, first)
    second = _made(1)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(second)
    assert restored is not None
    assert (restored.step, restored.notes) == (2, {})
    assert all(x is y for x, y in zip(restored.state, second, strict=True))
    assert [_step(*second) for _ in range(2)] == losses[2:]
    assert _bits(second) == _bits(whole)


def test_objects_are_updated_arrays_come_back_and_variables_are_assigned(tmp_path: Path) -> None:
    count = jaxdist.Variable(jnp.float32(2))
    param = nnx.Param(jnp.ones(2))
    state = {"model": Net(0), "ema": jnp.arange(3.0), "count": count, "p": param, "lr": 0.5}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {"epoch": 4})
        count.assign(jnp.float32(7))
        other = {**state, "model": Net(1), "ema": jnp.zeros(3), "p": nnx.Param(jnp.zeros(2))}
        restored = checkpoints.restore({**other, "lr": 0.0}, step=1)
    assert restored is not None
    assert restored.notes == {"epoch": 4}
    assert restored.state["model"] is other["model"]
    assert restored.state["p"] is other["p"]
    assert restored.state["count"] is count
    assert float(count.read_value()) == 2
    assert _bits(other["model"]) == _bits(state["model"])
    assert np.asarray(other["p"][...]).tolist() == [1, 1]
    assert restored.state["ema"].tolist() == [0, 1, 2]
    assert other["ema"].tolist() == [0, 0, 0], "arrays of the caller are never written"
    assert restored.state["lr"] == 0.5


@pytest.mark.parametrize(
    "value", [0.1, 3, True, 2j, np.float64(0.1), np.arange(3), np.array([2**40]), jnp.int8(3)]
)
def test_numbers_of_python_and_numpy_keep_their_bits_and_their_type(
    tmp_path: Path, value: Any
) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": value})
        restored = checkpoints.restore({"x": value})
    assert restored is not None
    found = restored.state["x"]
    if isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic):
        assert (type(found), found) == (type(value), value)
    assert np.asarray(found).dtype == np.asarray(value).dtype
    assert np.asarray(found).tobytes() == np.asarray(value).tobytes()


def test_restored_like_gives_objects_of_its_own(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, Net(0))
        like = Net(1)
        before = _bits(like)
        for found in (checkpoints.restore(1, like=like), checkpoints.restore_latest(like=like)):
            assert found is not None
            assert isinstance(found.state, Net)
            assert _bits(found.state) == _bits(Net(0))
            assert found.state is not like
    assert _bits(like) == before


def test_an_array_that_two_objects_share_is_saved_once(tmp_path: Path) -> None:
    model = Net(0)
    both = (model, nnx.ModelAndOptimizer(model, optax.sgd(0.1)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, both)
        checkpoints.wait_until_finished()
        records = (tmp_path / "1" / "leaves" / "process_0.json").read_text()
        names = json.loads(records)["leaves"]
        assert sum("kernel" in name for name in names) == 2
        other = Net(1)
        checkpoints.restore((other, nnx.ModelAndOptimizer(other, optax.sgd(0.1))))
    assert _bits(other) == _bits(model)


@pytest.mark.parametrize("how", ["damage", "shape", "step", "assign"])
def test_a_restore_that_fails_leaves_everything_as_it_was(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = jaxdist.Variable(jnp.float32(2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, (Net(0), count))
        count.assign(jnp.float32(5))
        model = Net(1, width=4 if how == "shape" else 3)
        before = _bits(model)
        error: Any = CheckpointError
        if how == "damage":
            checkpoints.wait_until_finished()
            error = DamagedCheckpointError
            for file in (tmp_path / "1" / "state" / "d").iterdir():
                file.write_bytes(b"not what was written")
        if how == "assign":
            # After the model is written: the worst moment.
            error, assign, calls = ZeroDivisionError, jaxdist.Variable.assign, []

            def fails_first(self: Any, value: Any) -> Any:
                calls.append(value)
                return assign(self, value) if len(calls) > 1 else 1 // 0

            monkeypatch.setattr(jaxdist.Variable, "assign", fails_first)
        with pytest.raises(error):
            checkpoints.restore((model, count), step=2 if how == "step" else None)
    assert _bits(model) == before
    assert float(count.read_value()) == 5


def _layouts(objects: Any) -> list[Any]:
    return [x.sharding for x in jax.tree.leaves(nnx.to_pure_dict(nnx.state(objects)))]


def test_pieces_and_layouts_are_those_of_the_objects_that_are_restored(tmp_path: Path) -> None:
    def sharded(seed: int, replicas: int) -> Any:
        strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        partition.place(strategy, (model, optimizer), partition.fsdp(min_bytes=0))
        return model, optimizer

    eight, four = sharded(0, 8), sharded(1, 4)
    plain = nnx.Linear(16, 8, rngs=nnx.Rngs(2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, eight)
        layout = _layouts(four)
        checkpoints.restore(four)
        assert _layouts(four) == layout
        checkpoints.restore((plain, nnx.Optimizer(plain, optax.adam(1e-3), wrt=nnx.Param)))
    wanted = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(plain.kernel[...], wanted.kernel[...])


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": {"name": "x"}}, "state['a']['name']"),
        ((jnp.ones(2), jax.nn.relu), "state[1]"),
        ([object()], "state[0]"),
        ({"when": np.datetime64("2020-01-01")}, "state['when']"),
    ],
)
def test_what_is_neither_array_nor_number_is_named_with_its_path(
    tmp_path: Path, state: Any, path: str
) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ArgumentTypeError) as caught:
            checkpoints.save(1, state)
        assert path in str(caught.value)
        assert checkpoints.steps() == ()


def test_another_job_that_only_reads_disturbs_nothing_and_one_that_writes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoints(tmp_path) as first:
        first.save(1, {"w": jnp.ones(2)})
        first.wait_until_finished()
        half = tmp_path / "2.orbax-checkpoint-tmp"
        half.mkdir()  # as if it were writing
        monkeypatch.setenv("JAXDIST_JOB_ID", "another")
        with Checkpoints(tmp_path) as second:
            assert second.restore({"w": jnp.zeros(2)}) is not None
            assert half.is_dir()
            with pytest.raises(CheckpointError, match="Another job uses"):
                second.save(3, {"w": jnp.ones(2)})
            assert half.is_dir()
    with Checkpoints(tmp_path) as second:
        second.save(3, {"w": jnp.ones(2)})
        assert second.steps() == (1, 3)


def test_a_state_of_all_kinds_is_found_again_in_other_objects(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Net, dict[str, Any], nnx.Param[Any]]:
        return Net(seed), {"a": jnp.full(2, float(seed))}, nnx.Param(jnp.full(1, float(seed)))

    saved, target = make(3), make(0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        restored = checkpoints.restore(target)
    assert restored is not None
    model, arrays, param = restored.state
    assert (model, param) == (target[0], target[2])
    assert _bits(model) == _bits(saved[0])
    assert arrays["a"].tolist() == [3, 3]
    assert param[...].tolist() == [3]
