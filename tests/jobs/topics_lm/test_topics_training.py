"""The language model's job: every layout has the losses of one device, and it resumes on any."""

import dataclasses
import functools
import io
import json
import tomllib
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import jaxdist
from jaxdist import jobs
from jaxdist.cli import main
from jaxdist.data import batches
from jaxdist.errors import CheckpointError, ConfigError
from jaxdist.jobs import _strategy, _tables, topics_lm
from jaxdist.jobs._tables import make_optimizer
from jaxdist.training import evaluate

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("topics_lm_*.toml"))
DATA_PARALLEL = next(path for path in CONFIGS if "data_parallel" in path.name)

_TINY = (
    "model.layers=1",
    "model.width=16",
    "model.heads=4",
    "model.hidden=32",
    "data.sequence_length=16",
    "data.stride=64",
    "data.test_fraction=0.01",
    "data.batch_size=16",
    # Drawn by example: every layout drops the same.
    "model.dropout=0.1",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=3",
)
_ONE = "strategy.virtual_devices=v5e:1x1"


def _loaded(*overrides: str, path: Path = DATA_PARALLEL) -> Any:
    return jobs.load_job_config(path, [*_TINY, *overrides])


def _partition(layout: str) -> str:
    names = ("fsdp_tensor_parallel", "fsdp", "tensor_parallel")
    return f"strategy.partition={next((n for n in names if n in layout), 'replicated')}"


@dataclasses.dataclass
class _Trained:
    losses: np.ndarray
    strategy: jaxdist.Strategy
    model: topics_lm.Transformer
    optimizer: Any
    task: topics_lm.TopicsTask


def _trained(*overrides: str, steps: int) -> _Trained:
    """The steps of a job without its loop."""
    config = _loaded(*overrides).values
    strategy, task = jobs.make_strategy(config), topics_lm.TopicsTask(config)
    model, optimizer = task.build(strategy)
    source = batches(task.data.train, 16, shuffle=True, drop_remainder=True, repeat=None)
    with iter(strategy.experimental_distribute_dataset(source)) as data:
        args = ((model, optimizer, next(data)) for _ in range(steps))
        losses = [float(strategy.run(task.train_step, a)) for a in args]
    return _Trained(np.asarray(losses), strategy, model, optimizer, task)


@pytest.fixture(scope="module")
def one_device() -> _Trained:
    """50 steps on one device."""
    return _trained(_ONE, steps=50)


def test_one_device_learns(one_device: _Trained) -> None:
    assert one_device.strategy.num_replicas_in_sync == 1
    assert one_device.losses[0] == pytest.approx(np.log(256), rel=0.02)
    assert one_device.losses[-1] < one_device.losses[0] - 1.5


_LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[int, int]]] = {
    "data_parallel": ((), (8, 1)),
    "tensor_parallel_4x2": (("strategy.logical_devices=2",), (4, 2)),
    "tensor_parallel_2x4": (("strategy.logical_devices=2x2",), (2, 4)),
    "fsdp": (("model.remat=parameters",), (8, 1)),
    "fsdp_tensor_parallel": (("strategy.logical_devices=2",), (4, 2)),
}


# What both together do is in the last one.
_SLOW = {"tensor_parallel_4x2", "fsdp"}


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in _LAYOUTS]
)
def test_every_layout_has_the_losses_of_one_device_over_50_steps(
    one_device: _Trained, layout: str
) -> None:
    overrides, mesh = _LAYOUTS[layout]
    found = _trained(*overrides, _partition(layout), "strategy.whole_below=0", steps=50)
    assert found.strategy.mesh.devices.shape == mesh
    np.testing.assert_allclose(found.losses, one_device.losses, rtol=1e-4)
    if layout != "fsdp_tensor_parallel":
        return
    held_out = {name: x[:21] for name, x in one_device.task.data.held_out.items()}
    means = [
        evaluate(t.strategy, t.task.evaluation_step, t.model, batches(held_out, 16))
        for t in (found, one_device)
    ]
    assert means[0]["weight"] == means[1]["weight"] == held_out["length"].sum()
    assert means[0]["loss"] == pytest.approx(means[1]["loss"], rel=1e-4)


_IN_SLICE = ("strategy.partition=fsdp_in_slice", "strategy.whole_below=0")


def _bytes_of_parameters(of: _Trained) -> int:
    """On one device."""
    state = jax.tree.leaves(nnx.state(of.model, nnx.Param))
    return sum(x.addressable_shards[0].data.nbytes for x in state)


def test_pieces_within_two_slices_have_the_losses_of_data_parallel_and_half_of_its_bytes() -> None:
    whole, pieces = (
        _trained("strategy.virtual_devices=v5e:2x2", *more, steps=4)
        for more in ((), (*_IN_SLICE, "strategy.slices=2"))
    )
    assert dict(pieces.strategy.mesh.shape) == {"slice": 2, "replica": 2, "logical": 1}
    np.testing.assert_allclose(pieces.losses, whole.losses, rtol=1e-5)
    assert _bytes_of_parameters(pieces) == _bytes_of_parameters(whole) // 2


_LISTED = "strategy.devices=['cpu:3', 'cpu:1', 'cpu:5', 'cpu:0']"


@pytest.mark.parametrize(
    ("entries", "rows"),
    [
        # Replicas follow a ring of chips, whose rows are 0 1, 2 3, 4 5, 6 7.
        (["strategy.slices=2"], [[0, 1, 3, 5], [7, 6, 4, 2]]),
        (["strategy.slices=4"], [[0, 1], [3, 5], [7, 6], [4, 2]]),
        (["strategy.virtual_devices=v5e:2x2*2"], [[0, 1, 3, 2], [4, 5, 7, 6]]),
        ([_LISTED, "strategy.slices=2"], [[3, 1], [5, 0]]),
    ],
    ids=["halves", "quarters", "named", "listed"],
)
def test_slices_are_rows_of_the_mesh(entries: list[str], rows: list[list[int]]) -> None:
    strategy = jobs.make_strategy(_loaded(*_IN_SLICE, *entries).values)
    assert strategy.layout.replica_axes == ("slice", "replica")
    assert [[d.id for d in row.ravel()] for row in strategy.mesh.devices] == rows


def test_tpus_that_say_their_slice_are_put_in_its_order_and_counted() -> None:
    tpus = [SimpleNamespace(platform="tpu", slice_index=i) for i in (1, 0, 1, 0)]
    assert _strategy.count_device_slices(tpus) == 2
    assert _strategy.count_device_slices(jax.devices()) is None
    # XLA writes NVLink domain, host and GPU into the coordinates of a GPU.
    gpus = [types.SimpleNamespace(platform="gpu", coords=[i // 4, 0, i % 4]) for i in range(8)]
    assert _strategy.count_device_slices(gpus) == 2
    assert [_strategy.get_slice_index(gpu) for gpu in gpus] == [0] * 4 + [1] * 4
    assert _strategy.count_device_slices(gpus[:4]) is None
    with pytest.raises(ConfigError, match=r"\{0: 1, 1: 2\}(.|\n)*List 1 of each"):
        _strategy.count_device_slices(tpus[:3])


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["strategy.slices=3"], r"slices is 3, and there are 8 replicas(.|\n)*slices to 2 or 4\."),
        (["strategy.slices=9"], r"slices is 9, and there are 8 replicas(.|\n)*slices to 8\."),
        (
            ["strategy.virtual_devices=v5e:2x2*2", "strategy.slices=4"],
            r"slices is 4, and the devices are in 2(.|\n)*set it to 2\.",
        ),
    ],
    ids=["between", "beyond", "named"],
)
def test_slices_that_the_devices_do_not_have_are_named(entries: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        jobs.make_strategy(_loaded(*_IN_SLICE, *entries).values)


def test_slices_that_do_not_divide_end_the_command_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sets = [word for e in (*_TINY, *_IN_SLICE, "strategy.slices=3") for word in ("--set", e)]
    assert main(["train", str(DATA_PARALLEL), *sets]) == 2
    assert "Set strategy.slices to 2 or 4." in capsys.readouterr().err


# The job


def _train(folder: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """Run the job in `folder`. Return its metrics and its output."""
    here = [f"output.directory='{folder}'", f"checkpoint.directory='{folder / 'checkpoints'}'"]
    loaded = _loaded(*here, "output.picture=", "optimizer.schedule=constant", *overrides)
    out = io.StringIO()
    strategy = jobs.make_strategy(loaded.values)
    jobs.train(loaded, strategy, console=Console(file=out, width=200))
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics, out.getvalue()


@pytest.mark.slow
def test_a_job_resumes_on_another_layout_and_ends_with_text(
    tmp_path: Path, one_device: _Trained
) -> None:
    layout = ("strategy.logical_devices=2", "strategy.partition=fsdp_tensor_parallel")
    first, _ = _train(tmp_path, *layout, "training.steps=4", "generate.bytes=0")
    assert "sample" not in first
    metrics, out = _train(tmp_path, _ONE, "training.steps=8", "generate.bytes=20")
    assert "resumed from step 4" in out
    np.testing.assert_allclose(metrics["losses"], one_device.losses[:8], rtol=1e-4)
    assert metrics["sample"].startswith("The ")
    assert metrics["sample"].replace("\0", "\n\n") in out
    counted = metrics["baseline_bits_per_byte"]
    assert 3 < counted["bigram"] < counted["unigram"] < 5
    assert f"counting pairs {counted['bigram']:.3f}" in out
    bits = metrics["evaluations"][-1]["loss"] / np.log(2)
    assert metrics["bits_per_byte"] == pytest.approx(bits)
    assert f"held out {bits:.3f} bits per byte" in out
    assert metrics["bytes_per_s"] > 0
    with pytest.raises(CheckpointError, match=r"data\.stride: saved 64, now 32"):
        _train(tmp_path, _ONE, "data.stride=32")


def test_updates_that_keep_state_in_pieces_keep_it_so_and_have_the_losses_of_one_device(
    one_device: _Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is worth cutting is a matter of links; here everything is.
    whole = functools.partial(jaxdist.sharded_update, min_bytes=0)
    monkeypatch.setattr(_tables, "sharded_update", whole)
    sharded = _trained("optimizer.update=sharded", steps=8)
    np.testing.assert_allclose(sharded.losses, one_device.losses[:8], rtol=1e-4)
    moments = [m.opt_state[1][0].mu for m in (sharded.optimizer, one_device.optimizer)]
    held, alone = (
        sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(m)) for m in moments
    )
    assert alone / 8 <= held < alone / 7
    compressed = _trained("optimizer.update=compressed", "optimizer.compression=bf16", steps=8)
    np.testing.assert_allclose(compressed.losses, one_device.losses[:8], rtol=1e-2)


# Configurations


def test_the_first_file_names_every_entry_and_what_it_says_is_the_default() -> None:
    document = tomllib.loads(DATA_PARALLEL.read_text())
    schema: dict[str, Any] = dataclasses.asdict(topics_lm.TopicsConfig())
    # The keys of this section are those of the compiler.
    assert document.pop("compiler") == {}
    del schema["compiler"]
    assert {s: set(body) for s, body in document.items()} == {
        s: set(body) for s, body in schema.items()
    }
    assert jobs.load_job_config(DATA_PARALLEL).values == topics_lm.TopicsConfig()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_shipped_file_has_a_strategy_that_shares_its_batch(path: Path) -> None:
    config = jobs.load_job_config(path).values
    strategy = jobs.make_strategy(config)
    assert config.data.batch_size % strategy.num_replicas_in_sync == 0
    assert strategy.mesh.devices.size == jobs.count_cpu_devices(config) == 8
    assert config.output.directory == f"runs/{path.stem}"
    assert config.checkpoint.directory == f"runs/{path.stem}/checkpoints"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("model.heads=3", r"model\.heads is 3, and model\.width is 16(.|\n)*heads to 2 or 4\."),
        ("model.width=15", r"model\.width to an even number, such as 16"),
        ("strategy.virtual_devices=v5e:2x", r"--set strategy\.virtual_devices(.|\n)*v5e:2x"),
        ("strategy.logical_devices=two", r"'two', which is neither a number nor a shape"),
        ("strategy.logical_devices=0", r"logical_devices must lie between 1"),
        ("strategy.logical_devices=2", r"2 devices of a replica would all do the same(.|\n)*or"),
        ("strategy.partition=tensor_parallel", r"is 1\.(.|\n)*partition to 'replicated'"),
        ("strategy.partition=fsdp_tensor_parallel", r"strategy\.partition to 'fsdp'"),
        ("strategy.slices=0", r"slices must lie between 1"),
        ("strategy.slices=2", r"'replicated'\.(.|\n)*to 'fsdp_in_slice'\."),
        ("strategy.partition=fsdp_in_slice_tensor_parallel", r"partition to 'fsdp_in_slice'\."),
        ("strategy.partition=zero", r"must be 'replicated' or 'tensor_parallel' or 'fsdp' or"),
    ],
)
def test_entries_that_do_not_fit_are_named_before_anything_starts(entry: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _loaded(entry)


_SPLIT = ("strategy.partition=tensor_parallel", "model.heads=16", "model.width=32")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["strategy.logical_devices=2", "model.hidden=33"], r"hidden is 33(.|\n)*to 32 or 34, or"),
        (["strategy.logical_devices=2x3"], r"heads is 16, and 6(.|\n)*to 12 or 18, or"),
        (["strategy.logical_devices=2", "optimizer.update=sharded"], r"update to 'replicated'"),
    ],
)
def test_entries_that_do_not_fit_tensor_parallelism_are_named(
    entries: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _loaded(*_SPLIT, *entries)


@pytest.mark.parametrize(
    ("asked", "words"),
    [(16, r"is 16, and no box(.|\n)*2, 4, 8"), ("8x1", r"'8x1', and (.|\n)*8 in x")],
)
def test_logical_devices_that_do_not_fill_the_slice_are_refused(asked: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        jobs.make_strategy(_loaded(*_SPLIT, f"strategy.logical_devices={asked}").values)


def test_logical_devices_are_boxes_of_the_slice_or_neighbours_in_the_list() -> None:
    boxes = {"2": [0, 1], "1x2": [0, 2], "4": [0, 1, 2, 3]}
    for asked, first in boxes.items():
        config = _loaded(*_SPLIT, f"strategy.logical_devices={asked}").values
        strategy = jobs.make_strategy(config)
        assert sorted(d.id for d in strategy.mesh.devices[0]) == first
        assert strategy.num_replicas_in_sync == 8 // len(first)
    listed = [*_SPLIT, "strategy.devices=['cpu:3', 'cpu:1', 'cpu:5', 'cpu:0']"]
    strategy = jobs.make_strategy(_loaded(*listed, "strategy.logical_devices=2").values)
    assert [[d.id for d in row] for row in strategy.mesh.devices] == [[3, 1], [5, 0]]
    with pytest.raises(ConfigError, match=r"is 8, and there are 4 devices(.|\n)*\[1, 2, 4\]"):
        jobs.make_strategy(_loaded(*listed, "strategy.logical_devices=8").values)


# What is planned


def test_the_planned_step_is_the_one_that_is_trained() -> None:
    loaded = _loaded()
    strategy = jobs.make_strategy(loaded.values)
    job = topics_lm.TopicsTask(loaded.values)
    assert job.rows_per_replica == 2
    both = _loaded("strategy.partition=fsdp", "optimizer.update=sharded")
    assert topics_lm.TopicsTask(both.values).rules[0] == "fsdp"
    task = topics_lm.TopicsTask(loaded.values)
    with strategy.scope():
        model = topics_lm.Transformer(loaded.values.model, rngs=nnx.Rngs(0))
        optimizer = make_optimizer(model, loaded.values.optimizer, num_steps=3)
    rows = {name: x[:16] for name, x in task.data.train.items()}
    batch = next(iter(strategy.experimental_distribute_dataset([rows])))
    real = strategy.lower(task.train_step, (model, optimizer, batch))
    abstract = job.lower(strategy, rows=2, rules="replicated")
    assert abstract.inputs == real.inputs
    assert abstract.results == real.results
    assert [c.kind for c in abstract.collectives] == [c.kind for c in real.collectives]
    model, optimizer = job.build(strategy, abstract=True)
    shapes = [nnx.state(model), nnx.state(optimizer), job.batch(16)]
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shapes))
    assert "data" not in vars(job)
