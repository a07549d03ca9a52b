"""Runs that resume with other values: relevant entries, errors, and the recorded changes."""

import dataclasses
import io
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import jaxdist
from jaxdist import jobs
from jaxdist._checkpoints import parts
from jaxdist.errors import CheckpointError, ConfigError
from jaxdist.jobs import TASKS, DigitsConfig, TrainingReport, load_config
from jaxdist.jobs._config.changes import find_changed_entries
from jaxdist.jobs._run.run import Run

SHIPPED = Path(__file__).parents[2] / "configs" / "digits_mirrored.toml"
SMALL = (
    "model.channels=[4]",
    "model.hidden=8",
    "data.batch_size=64",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "checkpoint.every=5",
    "output.picture=",
)


def _train(folder: Path, *overrides: str, accept: bool = False) -> tuple[TrainingReport, str]:
    here = [f"output.directory='{folder}'", f"checkpoint.directory='{folder / 'checkpoints'}'"]
    loaded = load_config(DigitsConfig, SHIPPED, [*SMALL, *here, *overrides])
    out = io.StringIO()
    console = Console(file=out, width=200)
    strategy = jaxdist.OneDeviceStrategy("cpu:0")
    return jobs.train(loaded, strategy, console=console, accept_changes=accept), out.getvalue()


def _metrics(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 steps; tests that go on copy it."""
    folder = tmp_path_factory.mktemp("trained")
    _train(folder, "training.steps=5")
    return folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """That run in a folder of its own."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("steps", [5, 10], ids=["finished", "unfinished"])
def test_an_entry_that_matters_is_an_error_with_both_values_and_both_ways_on(
    copy: Path, steps: int
) -> None:
    # But for the files of locks.
    files = [p for p in copy.rglob("*") if p.is_file() and not p.name.startswith(".")]
    before = {p: p.read_bytes() for p in files}
    with pytest.raises(CheckpointError) as caught:
        _train(copy, f"training.steps={steps}", "optimizer.learning_rate=0.1", "training.seed=3")
    told = str(caught.value)
    assert "optimizer.learning_rate: saved 0.003, now 0.1 (--set optimizer.learning_rate" in told
    assert "training.seed: saved 0, now 3" in told
    assert "--set checkpoint.directory=... and --set output.directory=" in told
    assert "--accept-changes" in told
    assert {p: p.read_bytes() for p in before} == before


def test_accepted_changes_hold_from_then_on_and_the_metrics_say_from_which_step(
    copy: Path,
) -> None:
    _, out = _train(
        copy, "training.steps=10", "optimizer.learning_rate=0.1", "data.batch_size=32", accept=True
    )
    assert "optimizer.learning_rate is 0.1 from here on, and was 0.003" in out
    found = _metrics(copy)
    assert [(c["after_step"], c["entry"], c["before"], c["after"]) for c in found["changes"]] == [
        (5, "data.batch_size", 64, 32),
        (5, "optimizer.learning_rate", 0.003, 0.1),
    ]
    assert len(found["losses"]) == 10
    # They are the run's values now.
    _, out = _train(copy, "training.steps=12", "optimizer.learning_rate=0.1", "data.batch_size=32")
    assert "from here on" not in out
    assert _metrics(copy)["changes"] == found["changes"]
    with pytest.raises(CheckpointError, match=r"learning_rate: saved 0\.1, now 0\.003"):
        _train(copy, "training.steps=14", "data.batch_size=32")


def test_more_steps_go_on_and_a_curve_over_the_steps_is_told(copy: Path, tmp_path: Path) -> None:
    first = _metrics(copy)["losses"]
    report, out = _train(copy, "training.steps=8", "training.log_every=1")
    assert (report.steps, report.was_finished) == (8, False)
    assert _metrics(copy)["losses"][:5] == first
    assert "from here on" not in out
    curved = tmp_path / "curved"
    _train(curved, "training.steps=5", "optimizer.schedule=cosine")
    _, out = _train(curved, "training.steps=6", "optimizer.schedule=cosine")
    assert "training.steps is 6 from here on, and was 5 (the learning rate follows a curve" in out


def test_a_checkpoint_that_fails_in_the_background_ends_the_run_and_is_not_called_saved(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts, "format_records", fill_disk)
    said: list[str] = []
    monkeypatch.setattr(Run, "_say", lambda _, text: said.append(text))
    with pytest.raises(CheckpointError, match=r"Checkpoint 10 cannot be written(.|\n)*No space"):
        _train(copy, "training.steps=500")
    assert "resumed from step 5" in said[0]
    assert not [line for line in said if ": saved" in line]
    assert _metrics(copy)["steps"] == 5


def test_a_run_without_its_files_writes_them_and_trains_nothing(copy: Path) -> None:
    metrics = _metrics(copy)
    (copy / "metrics.json").unlink()
    report, out = _train(copy, "training.steps=5")
    assert not report.was_finished
    assert "resumed from step 5" in out
    assert _metrics(copy)["losses"] == metrics["losses"]
    assert _metrics(copy)["accuracy"] == metrics["accuracy"]


def test_metrics_of_another_run_are_not_written_over(copy: Path) -> None:
    before = (copy / "metrics.json").read_bytes()
    with pytest.raises(ConfigError, match="holds the metrics of another run \\(5 steps\\)"):
        _train(copy, "training.steps=5", f"checkpoint.directory='{copy / 'others'}'")
    assert (copy / "metrics.json").read_bytes() == before


def test_a_checkpoint_without_a_configuration_is_gone_on_from_and_says_so(copy: Path) -> None:
    """Of a version that did not save it; its checksums are as that version wrote them."""
    folder = copy / "checkpoints" / "5"
    notes = json.loads((folder / "notes" / "metadata").read_text())
    del notes["config"]
    (folder / "notes" / "metadata").write_text(json.dumps(notes))
    records = json.loads((folder / "leaves" / "process_0.json").read_text())
    del records["checksum"]
    text = json.dumps([records, notes], sort_keys=True)
    records["checksum"] = zlib.crc32(text.encode())
    (folder / "leaves" / "process_0.json").write_text(json.dumps(records))
    (copy / "checkpoints" / "manifests" / "5.json").unlink()
    _, out = _train(copy, "training.steps=6", "optimizer.learning_rate=0.1")
    assert "does not record the values that it was trained with" in out


# Every entry

TOPICS = TASKS["topics_lm"].config_type
TABLE = TASKS["tabular_regression"].config_type
WORDS = TASKS["next_word"].config_type
FREE = {
    "checkpoint.directory", "checkpoint.every", "checkpoint.keep", "checkpoint.resume",
    "output.directory", "output.metrics", "output.picture", "generate.bytes", "generate.prompt",
    "generate.seed", "generate.temperature", "model.attention", "model.attention_chunk",
    "model.remat", "model.split_residual", "model.sums_between_slices", "optimizer.compression",
    "optimizer.workers", "strategy.devices", "strategy.kind", "strategy.logical_devices",
    "strategy.attention", "strategy.experts", "strategy.order", "strategy.positions",
    "strategy.chunks", "strategy.max_staleness", "strategy.micro_batches", "strategy.partition",
    "strategy.schedule", "strategy.servers", "strategy.slices", "strategy.stages",
    "strategy.virtual_devices", "strategy.whole_below",
    "strategy.workers", "training.donate", "training.evaluate_every", "training.log_every",
    "training.program", "training.steps",
}  # fmt: skip
NEVER = {
    "task", "data.missing", "data.rows", "data.seed", "data.sequence_length", "data.stride",
    "data.test_fraction", "model.channels", "model.experts", "model.head_dim",
    "model.heads", "model.hidden",
    "model.layers", "model.classes", "model.mlp", "model.output", "model.rows",
    "model.scan_layers", "model.vocabulary", "model.width",
}  # fmt: skip


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return [*value, 1]
    return value + 1 if isinstance(value, (int, float)) else f"not {value}"


@pytest.mark.parametrize("schema", [DigitsConfig, TOPICS, TABLE, WORDS], ids=lambda s: s.__name__)
def test_every_entry_is_free_or_changes_knowingly_or_never(schema: type[Any]) -> None:
    config = schema()
    count = 0
    for section, body in dataclasses.asdict(config).items():
        entries = body if isinstance(body, dict) else {section: body}
        for key, value in entries.items():
            saved = {section: {key: _other(value)}} if body is entries else {key: _other(value)}
            name = f"{section}.{key}" if body is entries else key
            [found] = find_changed_entries(saved, config)
            assert found.name == name
            wanted = "free" if name in FREE else "knowingly"
            assert found.change == ("never" if name in NEVER else wanted), name
            count += 1
    assert count > 25


def test_an_entry_without_effect_may_change_and_counts_where_it_has_one() -> None:
    config = DigitsConfig()
    compressed = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, update="compressed")
    )
    saved = dataclasses.asdict(compressed)
    saved["optimizer"]["workers"] = 4
    assert {c.name: c.change for c in find_changed_entries(saved, compressed)} == {
        "optimizer.workers": "knowingly"
    }
    assert {c.name: c.change for c in find_changed_entries(saved, config)} == {
        "optimizer.update": "knowingly",
        "optimizer.workers": "knowingly",
    }


def test_values_that_json_writes_alike_are_alike() -> None:
    config = DigitsConfig()
    assert find_changed_entries(json.loads(json.dumps(dataclasses.asdict(config))), config) == ()
    assert find_changed_entries({"training": {"seed": np.float64(0.0)}}, config) == ()
    [found] = find_changed_entries({"training": {"donate": 0}}, config)
    assert found.name == "training.donate"
