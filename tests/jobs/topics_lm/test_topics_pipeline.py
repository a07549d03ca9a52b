"""The language model on the stages of a pipeline: the losses of one device, plans, and errors."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import jaxdist
from jaxdist import jobs
from jaxdist.data import batches
from jaxdist.errors import ArgumentError, ConfigError, ShapeError
from jaxdist.jobs.topics_lm import TopicsTask, generate
from jaxdist.training import evaluate
from tests.jobs.topics_lm.layouts import TINY

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "topics_lm_pipeline.toml"
_ONE = ("strategy.virtual_devices=v5e:1x1", "strategy.stages=1")


def _loaded(*overrides: str) -> Any:
    return jobs.load_job_config(CONFIG, [*TINY, *overrides])


def _train(*overrides: str, steps: int = 5) -> tuple[list[float], float, bytes]:
    """Return the losses of some steps, the loss of an evaluation, and a text."""
    config = _loaded(*overrides).values
    strategy, task = jobs.make_strategy(config), TopicsTask(config)
    model, optimizer = task.build(strategy)
    source = batches(task.data.train, 16, shuffle=True, drop_remainder=True, repeat=None)
    with iter(strategy.experimental_distribute_dataset(source)) as data:
        args = ((model, optimizer, next(data)) for _ in range(steps))
        losses = [float(strategy.run(task.train_step, a)) for a in args]
    # The last batch has 5 of 16 rows.
    held_out = {name: x[:21] for name, x in task.data.held_out.items()}
    means = evaluate(strategy, task.evaluation_step, model, batches(held_out, 16))
    assert means["weight"] == held_out["length"].sum()
    text = generate(strategy, model, "The ", 4, context_length=16, temperature=0.0)
    return losses, means["loss"], text


@functools.cache
def _of_one_device(output: str) -> tuple[list[float], float, bytes]:
    return _train(*_ONE, f"model.output={output}")


_FSDP = ("strategy.partition=fsdp", "strategy.whole_below=0")
_BOTH = ("strategy.partition=fsdp_tensor_parallel", "strategy.whole_below=0")
_LAYOUTS: dict[str, tuple[str, ...]] = {
    "file": (),
    "chunks": (
        *_FSDP,
        "strategy.stages=2",
        "strategy.chunks=2",
        "strategy.schedule=zero_bubble",
        "model.remat=layers",
        "model.output=shared",
    ),
    "tensor": (
        *_BOTH,
        "strategy.stages=2",
        "strategy.logical_devices=2",
        "model.split_residual=true",
        "strategy.schedule=gpipe",
    ),
    "accumulation": ("strategy.stages=1", "strategy.micro_batches=2"),
    "slices": (
        "strategy.partition=fsdp_in_slice",
        "strategy.whole_below=0",
        "strategy.slices=2",
        "strategy.stages=2",
    ),
    # 4 stages do not divide 257 words, so the head is whole.
    "words": ("strategy.stages=4", "model.vocabulary=257"),
}
_SLOW = {"accumulation", "slices", "words"}


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in _LAYOUTS]
)
def test_a_pipeline_has_the_losses_of_one_device(layout: str) -> None:
    entries = _LAYOUTS[layout]
    output = "shared" if "model.output=shared" in entries else "own"
    words = [e for e in entries if "vocabulary" in e]
    one = _train(*_ONE, *words) if words else _of_one_device(output)
    losses, evaluated, text = _train(*entries)
    np.testing.assert_allclose(losses, one[0], atol=1e-5)
    assert evaluated == pytest.approx(one[1], rel=1e-5)
    assert text == one[2]
    assert one[0][0] - one[0][-1] > 0.1


@pytest.mark.parametrize(
    ("entries", "mesh"),
    [
        ((), {"replica": 2, "stage": 4}),
        (("strategy.devices=['cpu:3', 'cpu:1']", "strategy.stages=2"), {"replica": 1, "stage": 2}),
        (
            (
                "strategy.stages=2",
                "strategy.partition=tensor_parallel",
                "strategy.logical_devices=2x1",
            ),
            {"replica": 2, "stage": 2, "logical": 2},
        ),
        (
            ("strategy.stages=2", "strategy.partition=fsdp_in_slice", "strategy.slices=2"),
            {"slice": 2, "replica": 2, "stage": 2},
        ),
        (
            ("strategy.kind=multi_worker_mirrored", "strategy.virtual_devices=8"),
            {"replica": 2, "stage": 4},
        ),
        (("strategy.stages=1",), {"replica": 8, "logical": 1}),
    ],
)
def test_stages_are_an_axis_after_those_of_replicas(
    entries: tuple[str, ...], mesh: dict[str, int]
) -> None:
    strategy = jobs.make_strategy(_loaded(*entries).values)
    assert dict(strategy.mesh.shape) == mesh
    assert strategy.num_replicas_in_sync == mesh["replica"] * mesh.get("slice", 1)


def test_without_stages_and_micro_batches_the_model_has_no_pipeline() -> None:
    job = jobs.load_job(CONFIG, [*TINY, "strategy.stages=1", "strategy.schedule=gpipe"])
    model, _ = job.build(jobs.make_strategy(job.config), abstract=True)
    assert model.pipeline is None


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (("model.scan_layers=false",), r"stages is 4, and model\.scan_layers is false"),
        (
            ("model.scan_layers=false", "strategy.stages=1", "strategy.micro_batches=4"),
            r"micro_batches is 4, and(.|\n)*strategy\.micro_batches to 1",
        ),
        (("model.layers=6",), r"stages is 4, (.|\n)*Set model\.layers to 4 or 8"),
        (("strategy.chunks=2",), r"4 stages of 2 chunks(.|\n)*Set model\.layers to 8"),
        (("strategy.stages=1", "strategy.chunks=2"), r"chunks is 2, and strategy\.stages is 1"),
        (("strategy.schedule=pipedream",), r"must be '1f1b' or 'gpipe' or 'zero_bubble'"),
        (("optimizer.update=sharded",), r"'sharded', and strategy\.stages is 4"),
        (("strategy.deterministic=true",), r"deterministic is true, and strategy\.stages is 4"),
        (
            ("strategy.kind=parameter_server",),
            r"strategy\.stages is 4, of type int, and strategy\.kind",
        ),
    ],
)
def test_entries_that_do_not_fit_a_pipeline_are_named(entries: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _loaded(*entries)


@pytest.mark.parametrize("entry", ["stages=2", "schedule=gpipe", "micro_batches=2", "chunks=2"])
def test_a_task_without_a_stack_has_no_pipeline(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"task is 'digits'(.|\n)*no stacked layers"):
        jobs.load_job_config(ROOT / "configs" / "digits_mirrored.toml", [f"strategy.{entry}"])
    job = jobs.load_job(ROOT / "configs" / "digits_mirrored.toml")
    with pytest.raises(ArgumentError, match="stages=2, and the model has no stacked layers"):
        job.with_stages(2)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (("data.batch_size=15",), r"batch_size is 15(.|\n)*to 14 or 16\."),
        (
            ("strategy.micro_batches=3",),
            r"micro_batches is 3(.|\n)*to 12 or 18, or strategy\.micro_batches to one of \[1, 2",
        ),
    ],
)
def test_replicas_have_the_same_micro_batches(
    entries: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    here = [f"output.directory='{tmp_path}'", f"checkpoint.directory='{tmp_path / 'saved'}'"]
    loaded = _loaded(*here, *entries, "output.picture=")
    strategy = jobs.make_strategy(loaded.values)
    with pytest.raises(ConfigError, match=words):
        jobs.train(loaded, strategy, console=Console(quiet=True))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            ("strategy.devices=['cpu:0', 'cpu:1', 'cpu:2']", "strategy.stages=2"),
            "times strategy.stages is 2, and",
        ),
        (("strategy.stages=16", "model.layers=16"), "times strategy.stages is 16, and no box"),
        (
            (
                "strategy.kind=multi_worker_mirrored",
                "strategy.virtual_devices=8",
                "strategy.stages=3",
                "model.layers=3",
            ),
            "strategy.stages is 3, and the processes have 8 devices",
        ),
    ],
)
def test_stages_that_do_not_divide_the_devices_are_named(
    entries: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        jobs.make_strategy(_loaded(*entries).values)


def _run_job(folder: Path, *entries: str) -> list[float]:
    """Run the job in a folder, and return its losses."""
    here = [f"output.directory='{folder}'", f"checkpoint.directory='{folder / 'checkpoints'}'"]
    more = ("output.picture=", "generate.bytes=0", "optimizer.warmup_steps=1", *entries)
    loaded = _loaded(*here, *more)
    strategy = jobs.make_strategy(loaded.values)
    jobs.train(loaded, strategy, console=Console(quiet=True))
    losses: list[float] = json.loads((folder / "metrics.json").read_text())["losses"]
    return losses


@pytest.mark.slow
def test_a_job_resumes_on_other_stages_and_chunks(tmp_path: Path) -> None:
    whole = _run_job(tmp_path / "whole", "training.steps=4", *_ONE)
    _run_job(tmp_path / "parts", "training.steps=2")
    chunks = (*_FSDP, "strategy.stages=2", "strategy.chunks=2")
    _run_job(tmp_path / "parts", "training.steps=3", *chunks)
    found = _run_job(tmp_path / "parts", "training.steps=4", *_ONE)
    np.testing.assert_allclose(found, whole, atol=1e-5)


# Plans

_PLANNED = ("model.dropout=0", "data.sequence_length=8", "model.remat=layers")


def test_a_pipeline_is_planned_with_its_permutes() -> None:
    pytest.importorskip("libtpu")
    job = jobs.load_job(CONFIG, [*TINY, *_PLANNED])
    plan = jobs.plan_job(job, "v5e:2x4", quick=True)
    assert (plan.num_replicas, plan.num_logical) == (2, 4)
    assert plan.memory.fits
    assert "permute" in str(plan)


def test_pieces_of_layers_are_gathered_and_summed_in_the_dtype_of_the_products() -> None:
    pytest.importorskip("libtpu")

    def count_sent(dtype: str) -> int:
        entries = (*_FSDP, "strategy.stages=2", f"model.dtype={dtype}")
        job = jobs.load_job(CONFIG, [*TINY, *_PLANNED, *entries])
        plan = jobs.plan_job(job, "v5e:2x4", quick=True)
        kinds = ("all-reduce", "reduce-scatter")
        return sum(t.num_bytes for t in plan.traffic if t.kind in kinds and t.axes == ("replica",))

    of_stage = 2 * (4 * 16 * 16 + 2 * 16 * 32)
    of_head = 16 * 256
    assert count_sent("float32") - count_sent("bfloat16") == 2 * (of_stage + of_head)


def test_a_sweep_tries_stages_and_says_which_do_not_divide_the_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("libtpu")
    entries = [*TINY, *_PLANNED, "model.layers=6", "strategy.stages=2", "data.batch_size=8"]
    job = jobs.load_job(CONFIG, entries)
    monkeypatch.setattr(TopicsTask, "rules", property(lambda self: ("fsdp",)))
    sweep = jobs.sweep_job(job, "v5e:2x2")
    found = {c.stages: c for c in sweep.candidates}
    assert [*found] == [1, 2, 4]
    assert (found[2].num_replicas, found[2].num_logical) == (2, 2)
    assert found[1].plan
    assert found[2].plan
    assert found[4].plan is None
    assert "4 stages do not divide 6 layers" in found[4].reason
    assert "stages" in str(sweep)
    assert sweep.best is not None


def test_logical_devices_of_stages_may_be_a_shape() -> None:
    pytest.importorskip("libtpu")
    entries = ("strategy.stages=2", "strategy.partition=tensor_parallel")
    job = jobs.load_job(CONFIG, [*TINY, *_PLANNED, *entries, "strategy.logical_devices=2x1"])
    plan = jobs.plan_job(job, "v5e:2x4", quick=True)
    assert (plan.num_replicas, plan.num_logical) == (2, 4)
    with pytest.raises(ArgumentError, match="logical=0"):
        jobs.plan_job(job, "v5e:2x4", logical="0x2", quick=True)


def test_a_task_with_layers_that_its_chunks_do_not_divide_is_refused_when_it_is_built() -> None:
    config = _loaded().values
    asked = dataclasses.replace(config.strategy, stages=2, chunks=3)
    task = TopicsTask(dataclasses.replace(config, strategy=asked))
    with pytest.raises(ShapeError, match="Use 3 or 6 layers"):
        task.build(jobs.make_strategy(task.config), abstract=True)
    assert task.with_stages(1).config.strategy.chunks == 1
    assert isinstance(jobs.make_strategy(task.with_stages(1).config), jaxdist.Strategy)
