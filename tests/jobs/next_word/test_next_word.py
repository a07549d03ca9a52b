"""`configs/embedding_parameter_server.toml` with a small table: it learns, resumes, moves rows."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxdist import jobs
from jaxdist._buckets import BucketPath
from jaxdist._parameter_server.protocol import Read
from jaxdist._parameter_server.server import VariableServer
from jaxdist.coordinator import ShardedVariable
from jaxdist.errors import CheckpointError, ConfigError, UnsupportedError
from jaxdist.jobs._run import run_state
from jaxdist.jobs._run.run_state import TableFiles
from jaxdist.jobs.next_word import NextWordTask
from jaxdist.jobs.next_word import _task as task_module
from jaxdist.jobs.next_word._words import NUM_FEATURES, find_rows, load_examples
from tests.parameter_server.wrapping import wrap
from tests.strategies.oracle import refused

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "embedding_parameter_server.toml"
# 65,536 rows of 8 numbers: 2 MiB, the least that is cut in two.
SMALL = ("model.rows=65536", "model.width=8", "model.classes=16", "output.picture=")
FEW = ("training.log_every=10", "training.evaluate_every=100", "checkpoint.every=100")


@pytest.fixture(scope="module", autouse=True)
def _little_text() -> Any:
    """Train on a part of the text, and hold out little, so that evaluations are short."""
    with pytest.MonkeyPatch.context() as patch:

        def load(*args: Any) -> Any:
            train, held_out, checksum = load_examples(*args)
            parts = ({k: v[:4000] for k, v in part.items()} for part in (train, held_out))
            return (*parts, checksum)

        patch.setattr(task_module, "load_examples", load)
        yield


def _load(folder: Path, *overrides: str) -> Any:
    here = [f"output.directory='{folder}'", f"checkpoint.directory='{folder / 'checkpoints'}'"]
    return jobs.load_job_config(CONFIG, [*here, *SMALL, *FEW, *overrides])


def _train(folder: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    loaded, out = _load(folder, *overrides), io.StringIO()
    strategy = jobs.make_strategy(loaded.values)
    jobs.train(loaded, strategy, console=Console(file=out, width=200))
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics, out.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 100 steps of one worker."""
    folder = tmp_path_factory.mktemp("trained")
    _train(folder, "training.steps=100", "strategy.workers=1")
    return folder


def test_the_loss_falls_and_every_step_counts(tmp_path: Path) -> None:
    found, out = _train(tmp_path, "training.steps=100")
    assert "on 2 server(s), 2 asynchronous worker(s)" in out
    assert np.mean(found["losses"][-10:]) < 0.85 * np.mean(found["losses"][:10])
    counts = found["parameter_servers"]
    assert (counts["scheduled"], counts["applied"], counts["lost"]) == (100, 100, 0)


def test_one_worker_has_the_losses_of_one_replica_whose_table_is_whole(
    trained: Path, tmp_path: Path
) -> None:
    alone = ["strategy.kind=auto", "strategy.virtual_devices=1"]
    found, _ = _train(tmp_path, *alone, "training.steps=20", "checkpoint.every=10")
    losses = json.loads((trained / "metrics.json").read_text())["losses"]
    np.testing.assert_allclose(losses[:20], found["losses"], rtol=1e-4)
    # That table is in the checkpoint itself.
    assert not (tmp_path / "checkpoints" / "tables").exists()
    resumed, out = _train(tmp_path, *alone, "training.steps=30", "checkpoint.every=10")
    assert "resumed from step 20" in out
    np.testing.assert_allclose(losses[:30], resumed["losses"], rtol=1e-4)


def test_a_step_and_an_evaluation_move_rows_and_never_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = jobs.load_job(CONFIG, SMALL)
    strategy = jobs.make_strategy(task.config)
    moved: list[str] = []

    def note(request: Any, go_on: Any) -> Any:
        moved.extend(request.names)
        return go_on()

    model, optimizer = task.build(strategy)
    assert isinstance(model.table.variable, ShardedVariable)
    assert [int(v.shape[0]) for v in model.table.variable.variables] == [32768, 32768]
    monkeypatch.setattr(VariableServer, "call", wrap(VariableServer.call, Read, note))
    batch = jax.tree.map(lambda x: x[:8], task.data.train)
    strategy.run(task.train_step, (model, optimizer, batch))
    strategy.run(task.evaluation_step, (model, batch, np.ones(8, bool)))
    changed = np.unique(batch["features"])
    rows = np.asarray(model.table.variable.sparse_read(changed))
    assert np.count_nonzero(rows.any(axis=1)) > len(changed) // 2
    assert moved
    assert [name for name in moved if "table" in name] == []


@pytest.mark.parametrize("servers", [2, 1])
def test_a_run_resumes_with_the_rows_of_its_table(
    trained: Path, tmp_path: Path, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several parts for each shard.
    monkeypatch.setattr(run_state, "_PART_BYTES", 2**18)
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    more = ["training.steps=120", "strategy.workers=1", f"strategy.servers={servers}"]
    found, out = _train(tmp_path, *more, "checkpoint.keep=1")
    assert "resumed from step 100" in out
    assert found["parameter_servers"]["scheduled"] == 20
    # Without the rows of the table the loss would begin where the first run began.
    assert max(found["losses"][100:]) < min(found["losses"][:5])
    assert [p.name for p in (tmp_path / "checkpoints" / "tables").iterdir()] == ["120"]


@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_a_damaged_table_is_named(trained: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / "tables" / "100" / "table.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    new = {"gone": None, "cut": bytes(content[:-8]), "changed": bytes(content)}[damage]
    path.unlink()
    if new is not None:
        path.write_bytes(new)
    told = {"gone": "No such file", "cut": "cannot reshape", "changed": "its checksum is "}[damage]
    with refused(CheckpointError, "The table 'table' of step 100 cannot be read", told):
        _train(tmp_path, "training.steps=110", "strategy.workers=1")


def test_a_table_of_another_shape_is_refused(trained: Path) -> None:
    task = jobs.load_job(CONFIG, [*SMALL, "model.rows=1024"])
    model, _ = task.build(jobs.make_strategy(task.config))
    files = TableFiles(trained / "checkpoints", {"table": model.table.variable})
    with refused(CheckpointError, r"its shape is [65536, 8], and the table has [1024, 8]"):
        files.load(100, {})


def test_a_plan_is_refused() -> None:
    task = jobs.load_job(CONFIG, [*SMALL, "strategy.kind=auto"])
    with refused(UnsupportedError, "NextWordTask.build was called with abstract=True", "'table'"):
        task.lower(jobs.make_strategy(task.config), 4, "replicated")


def test_examples_are_the_same_each_time_and_held_out_ones_are_others() -> None:
    train, held_out, checksum = load_examples(1000, 8, 0.1, 0)
    assert train["features"].shape[1] == NUM_FEATURES == len(find_rows([b"a", b"b", b"c"], 1000))
    assert 0 <= train["features"].min() <= train["features"].max() < 1000
    assert set(np.unique(train["label"])) == set(range(8))
    assert 0.02 < len(held_out["label"]) / len(train["label"]) < 0.3
    again = load_examples(1000, 8, 0.1, 0)
    np.testing.assert_array_equal(again[0]["features"], train["features"])
    assert again[2] == checksum
    assert load_examples(1000, 8, 0.1, 1)[2] != checksum


def test_the_task_says_what_its_measures_are() -> None:
    task = NextWordTask(jobs.load_job_config(CONFIG).values)
    assert task.units_per_example == 1
    assert task.measures({"loss": 1.0, "accuracy": 0.5, "weight": 8.0})["words"] == 8.0


def test_tables_on_servers_need_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"the tables 'items' are on parameter servers"):
        TableFiles(BucketPath("gs", "bucket", "run"), {"items": None})
    assert not TableFiles(BucketPath("gs", "bucket", "run"), {}).save(1)
