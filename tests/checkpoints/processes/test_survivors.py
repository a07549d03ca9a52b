"""When a process ends, another one saves the last complete step, or says that it cannot."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist._checkpoints.local_storage import LocalStorage
from jaxdist._checkpoints.survivors import Snapshots, Survivor
from jaxdist.errors import ArgumentTypeError, UnavailableError
from jaxdist.training import Checkpoints
from tests.checkpoints.processes import surviving
from tests.processes.job import run_job

_AT = 12


@pytest.mark.parametrize("victim", [0, 1])
def test_a_survivor_saves_the_last_complete_step(tmp_path: pathlib.Path, victim: int) -> None:
    args = (str(tmp_path), victim, _AT, "replicated")
    outcomes = run_job(surviving.train_until_killed, 2, args=args, devices=2)
    other = outcomes[1 - victim]
    assert outcomes[victim].exit_code == -9, outcomes[victim].describe()
    assert other.exit_code == 0, other.describe()
    assert other.result["processes"] == (victim,)
    first, *_, last = other.result["message"].splitlines()
    assert f"process {victim}" in first
    assert f"process {1 - victim}" not in first
    assert last == f"The last complete step is saved: {tmp_path / str(_AT)}."
    model, optimizer = surviving.make_objects()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == (0, _AT)
        found = checkpoints.restore((model, optimizer))
    assert found is not None
    assert found.notes == {"how": "replicated"}
    wanted = surviving.train_alone(_AT)
    np.testing.assert_allclose(np.asarray(model.kernel[...]), wanted, atol=1e-5)


@pytest.mark.parametrize("how", ["fsdp", "rows"])
def test_where_no_process_has_a_full_copy_the_last_checkpoint_counts(
    tmp_path: pathlib.Path, how: str
) -> None:
    args = (str(tmp_path), 1, _AT, how)
    outcomes = run_job(surviving.train_until_killed, 2, args=args, devices=2)
    assert outcomes[0].exit_code == 0, "\n".join(one.describe() for one in outcomes)
    last = outcomes[0].result["message"].splitlines()[-1]
    assert last.startswith("Nothing was saved now: ")
    assert "is in pieces" in last
    assert last.endswith(f"The last checkpoint counts: {tmp_path / '0'}.")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == (0,)


@pytest.mark.parametrize("returned", [None, 3, (1,), ("1", {}), (1, {}, {}, {})])
def test_a_callback_that_returns_something_else_is_an_error(returned: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"on_failure was given a callback that returned"):
        Snapshots(lambda: returned).take()


def test_the_state_before_each_step_is_kept_until_a_later_one_is_computed() -> None:
    state = {"w": np.zeros(2)}
    step = 0
    snapshots = Snapshots(lambda: (step, state, lambda: {"step": step}))
    for step in range(30):
        state = {"w": np.full(2, step)}
        snapshots.take()
        # A second program of the same step changes nothing.
        state = {"w": np.full(2, -1)}
        snapshots.take()
    found, leaves, notes = snapshots.find_newest()
    assert (found, leaves["w"].tolist(), notes) == (29, [29, 29], {"step": 29})


def test_a_state_with_random_keys_is_kept() -> None:
    state = {"w": jnp.arange(3.0), "key": jax.random.key(4)}
    snapshots = Snapshots(lambda: (0, state))
    snapshots.take()
    jax.block_until_ready(state)
    found, leaves, _ = snapshots.find_newest()
    assert (found, sorted(leaves)) == (0, ["key", "w"])


def test_a_survivor_of_a_training_that_went_back_says_that_a_later_checkpoint_exists(
    tmp_path: pathlib.Path,
) -> None:
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for saved in 4, 5, 6:
            checkpoints.save(saved, {"w": jnp.full(3, float(saved))})
    step, storage = 4, LocalStorage(tmp_path)
    survivor = Survivor(storage, 3, lambda: None, lambda: (step, {"w": jnp.ones(2)}))
    survivor.snapshots.take()
    said = survivor.act(UnavailableError("process 1 has ended", (1,)))
    assert said.startswith("Nothing was saved now: the last complete step is 4, and checkpoint 6 ")
    assert said.endswith(f"The last checkpoint counts: {tmp_path / '6'}.")
    step = 6
    survivor = Survivor(storage, 3, lambda: None, lambda: (step, {"w": jnp.ones(2)}))
    survivor.snapshots.take()
    said = survivor.act(UnavailableError("process 1 has ended", (1,)))
    assert said == f"The last complete step is saved: {tmp_path / '6'}."
