"""The language model with experts: the losses of one device, drops, plans, and errors."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist import hlo, jobs
from jaxdist.errors import ArgumentError, CheckpointError, ConfigError
from jaxdist.jobs.topics_lm import ModelConfig, TopicsTask, Transformer
from jaxdist.jobs.topics_lm._layers import Experts
from jaxdist.jobs.topics_lm._layout import Pipeline
from tests.jobs.topics_lm.layouts import CONFIGS, FSDP, ONE, STAGES, Trained, load, run_job, train

_NAME = "experts"
_TWO = "strategy.experts=2"


@functools.cache
def _of_one_device(*entries: str) -> Trained:
    return train(_NAME, *ONE, *entries)


_LAYOUTS: dict[str, tuple[str, ...]] = {
    "file": (),
    "stack": ("model.scan_layers=true", *FSDP, "model.remat=layers"),
    "pieces": (*FSDP, "strategy.experts=1"),
    "stages": (_TWO, *STAGES, "strategy.schedule=zero_bubble"),
    "chunks": (_TWO, *STAGES, *FSDP, "strategy.chunks=2", "model.layers=4"),
    "accumulation": ("strategy.micro_batches=2", "model.scan_layers=true"),
    "positions": (_TWO, "strategy.positions=2", "strategy.order=contiguous"),
    "all": (_TWO, "strategy.positions=2", "strategy.order=contiguous", *STAGES),
    "slices": (
        _TWO,
        "strategy.slices=2",
        "strategy.partition=fsdp_in_slice",
        "strategy.whole_below=0",
    ),
}
_SLOW = {*_LAYOUTS} - {"file", "stages"}


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in _LAYOUTS]
)
def test_divided_experts_have_the_losses_and_drops_of_one_device(layout: str) -> None:
    entries = _LAYOUTS[layout]
    one = _of_one_device(*(e for e in entries if "layers=4" in e))
    found = train(_NAME, *entries)
    for name in ("loss", "balance", "dropped"):
        np.testing.assert_allclose(found.of(name), one.of(name), atol=1e-5, err_msg=name)
    assert found.loss == pytest.approx(one.loss, rel=1e-5)
    assert found.text == one.text
    assert one.of("loss")[0] - one.of("loss")[-1] > 0.1
    assert 0.05 < one.of("dropped").min() < one.of("dropped").max() < 0.5
    assert one.of("balance").min() > 1


def test_experts_are_an_axis_and_each_device_computes_as_much_as_without_it() -> None:
    flops = []
    for entries, mesh in (
        ((), {"replica": 2, "experts": 4}),
        (("strategy.experts=1",), {"replica": 8, "logical": 1}),
    ):
        config = load(_NAME, "model.dropout=0", *entries).values
        task, strategy = TopicsTask(config), jobs.make_strategy(config)
        assert dict(strategy.mesh.shape) == mesh
        rows = 16 // strategy.num_replicas_in_sync
        program = task.lower(strategy, rows, "replicated").compile()
        flops.append(hlo.work(program.as_text()).flops)
        kinds = {c.kind for c in program.collectives}
        assert ("all-to-all" in kinds) == ("experts" in mesh)
    # Rows are divided over the devices of the experts, so attention is computed once.
    assert flops[0] == pytest.approx(flops[1], rel=0.02)


@pytest.mark.parametrize("mlp", ["gelu", "gated"])
def test_a_mixture_of_all_experts_is_the_weighted_sum_of_their_mlps(mlp: Any) -> None:
    config = ModelConfig(width=8, heads=2, hidden=12, mlp=mlp, experts=3, top_k=3, capacity=0.0)
    init = nnx.initializers.normal(0.5)
    linear = {"kernel_init": init, "dtype": jnp.float32}
    layer = Experts(config, out_init=init, linear=linear, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("f4")
    y, routing = layer(jnp.asarray(x))
    logits = x @ np.asarray(layer.router[...])
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.zeros_like(x)
    for i in range(3):
        up, down = (np.asarray(w[...])[i] for w in (layer.up, layer.down))
        hidden = jax.nn.gelu(x @ up)
        if mlp == "gated":
            hidden = jax.nn.silu(x @ np.asarray(layer.gate[...])[i]) * (x @ up)
        expected += weights[..., i : i + 1] * np.asarray(hidden @ down)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(routing, [1.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("scanned", [False, True])
def test_byte_by_byte_experts_give_the_logits_of_all_at_once(scanned: bool) -> None:
    config = ModelConfig(
        layers=2, width=16, heads=2, hidden=16, experts=4, capacity=0.0, scan_layers=scanned
    )
    model = Transformer(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 6)))
    caches, found = model.empty_caches(2, 6), []
    for position in range(6):
        logits, caches = model.step(tokens[:, position], caches, jnp.asarray(position))
        found.append(logits)
    np.testing.assert_allclose(np.stack(found, 1), model(tokens), atol=1e-5)


def test_the_balance_loss_is_trained_with_its_factor_and_is_not_in_the_reported_loss() -> None:
    weak, strong = (_of_one_device(f"model.balance={b}") for b in ("0", "1.0"))
    assert weak.of("loss")[0] == pytest.approx(strong.of("loss")[0], rel=1e-6)
    assert strong.of("balance")[-1] < weak.of("balance")[-1]


def test_micro_batches_have_a_row_for_each_device_of_the_experts() -> None:
    chosen = [Pipeline(2, least_rows=n).choose_micro_batches(16) for n in (1, 2, 4, 32)]
    assert chosen == [8, 8, 4, 16]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            ("model.experts=6",),
            r"experts is 4, and model\.experts is 6(.|\n)*4 or 8, or(.|\n)*to 3",
        ),
        (("model.experts=0",), r"model\.experts is 0(.|\n)*Set model\.experts to 4, or(.|\n)*to 1"),
        (("model.top_k=9",), r"top_k is 9, and model\.experts is 8(.|\n)*to 8 or less"),
        (("model.capacity=-1",), r"model\.capacity"),
        (
            ("strategy.partition=tensor_parallel", "strategy.logical_devices=2", _TWO),
            r"'tensor_parallel', and model\.experts is 8(.|\n)*'replicated' or 'fsdp'",
        ),
        (("model.split_residual=true",), r"split_residual is true, and\s+strategy\.experts is 4"),
        (("optimizer.update=sharded",), r"'sharded', and strategy\.experts is 4"),
        (("strategy.deterministic=true",), r"deterministic is true, and strategy\.experts is 4"),
        (("strategy.kind=parameter_server",), r"strategy\.experts is 4, of type int, and"),
    ],
)
def test_entries_that_do_not_fit_experts_are_named(entries: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(_NAME, *entries)


def test_a_task_without_experts_has_no_devices_for_them() -> None:
    with pytest.raises(ConfigError, match=r"task is 'digits'(.|\n)*has no experts"):
        jobs.load_job_config(CONFIGS / "digits_mirrored.toml", ["strategy.experts=2"])


def test_a_partition_that_splits_kernels_is_refused_for_experts_that_devices_divide() -> None:
    config = load(_NAME, _TWO).values
    task = TopicsTask(config)
    assert "tensor_parallel" not in task.rules
    with pytest.raises(ArgumentError, match="tensor_parallel"):
        task.with_rules("tensor_parallel")
    split = dataclasses.replace(config.strategy, partition="tensor_parallel")
    task = TopicsTask(dataclasses.replace(config, strategy=split))
    with pytest.raises(ConfigError, match=r"is 'tensor_parallel', and strategy\.experts is 2"):
        task.build(jobs.make_strategy(config), abstract=True)


@pytest.mark.slow
def test_a_job_resumes_without_divided_experts_and_logs_the_drops_of_each_step(
    tmp_path: Path,
) -> None:
    whole = run_job(tmp_path / "whole", _NAME, "training.steps=4", *ONE)
    run_job(tmp_path / "parts", _NAME, "training.steps=2")
    run_job(tmp_path / "parts", _NAME, "training.steps=3", _TWO, *FSDP)
    found = run_job(tmp_path / "parts", _NAME, "training.steps=4", *ONE)
    np.testing.assert_allclose(found["losses"], whole["losses"], atol=1e-5)
    assert found["measures"].keys() == {"balance", "dropped"}
    for name, values in whole["measures"].items():
        assert len(values) == 4
        np.testing.assert_allclose(found["measures"][name], values, atol=1e-5)
    assert found["sample"] == whole["sample"]
    with pytest.raises(CheckpointError, match=r"model\.experts: saved 8, now 4"):
        run_job(tmp_path / "parts", _NAME, "training.steps=5", "model.experts=4")


_PLANNED = ("model.dropout=0", "data.batch_size=8", "model.remat=layers")


def test_a_sweep_tries_devices_for_experts_and_says_which_do_not_divide_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("libtpu")
    job = TopicsTask(load(_NAME, *_PLANNED, "model.experts=6", _TWO).values)
    assert "tensor_parallel" not in job.rules
    monkeypatch.setattr(TopicsTask, "rules", property(lambda self: ("fsdp",)))
    sweep = jobs.sweep_job(job, "v5e:2x2")
    found = {c.experts: c for c in sweep.candidates}
    assert [*found] == [1, 2, 4]
    assert (found[2].num_replicas, found[2].num_logical) == (2, 2)
    assert found[2].plan
    assert "all-to-all" in str(found[2].plan)
    assert found[4].plan is None
    assert "needs 4 logical devices to divide dim 0, which has 6 elements" in found[4].reason
    assert "experts" in str(sweep)


@pytest.mark.parametrize(
    ("rows", "stages", "asked", "found"),
    [(16, 1, 0, 4), (16, 4, 0, 16), (96, 4, 0, 16), (30, 2, 0, 10), (7, 4, 0, 7), (16, 4, 2, 2)],
)
def test_micro_batches_are_enough_for_short_waits(
    rows: int, stages: int, asked: int, found: int
) -> None:
    assert Pipeline(stages, "1f1b", asked).choose_micro_batches(rows) == found
