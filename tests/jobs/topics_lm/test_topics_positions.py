"""The language model with positions over devices: the losses of one device, plans, and errors."""

import functools
from pathlib import Path

import numpy as np
import pytest

from jaxdist import jobs
from jaxdist.errors import ConfigError
from jaxdist.jobs.topics_lm import TopicsTask
from tests.jobs.topics_lm.layouts import CONFIGS, FSDP, ONE, STAGES, Trained, load, run_job, train

_NAME = "long_sequences"
_RING = "strategy.attention=ring"
_TWO = "strategy.positions=2"


@functools.cache
def _of_one_device() -> Trained:
    return train(_NAME, *ONE)


_LAYOUTS: dict[str, tuple[str, ...]] = {
    "file": (),
    "ring": (_RING, "strategy.order=contiguous", "model.attention_chunk=3"),
    "stack": ("model.scan_layers=true", "strategy.attention=gather", *FSDP, "model.remat=layers"),
    "tensor": (
        _TWO,
        "strategy.logical_devices=2",
        "strategy.partition=fsdp_tensor_parallel",
        "strategy.whole_below=0",
    ),
    # Dropout and rotary positions inside of a stage, in zigzag order.
    "stages": (_TWO, *STAGES),
    "ring in stages": (_TWO, _RING, *STAGES),
    "slices": (
        _TWO,
        _RING,
        "strategy.slices=2",
        "strategy.partition=fsdp_in_slice",
        "strategy.whole_below=0",
    ),
    "update": ("optimizer.update=sharded",),
}
_SLOW = {"stack", "tensor", "slices", "update"}


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in _LAYOUTS]
)
def test_divided_positions_have_the_losses_of_one_device(layout: str) -> None:
    one, found = _of_one_device(), train(_NAME, *_LAYOUTS[layout])
    np.testing.assert_allclose(found.of("loss"), one.of("loss"), atol=5e-6)
    assert found.loss == pytest.approx(one.loss, rel=1e-5)
    assert found.text == one.text
    assert one.of("loss")[0] - one.of("loss")[-1] > 0.1


@pytest.mark.parametrize(
    ("entries", "mesh"),
    [
        ((), {"replica": 2, "positions": 4}),
        (
            ("strategy.stages=2", "model.scan_layers=true", _TWO),
            {"replica": 2, "stage": 2, "positions": 2},
        ),
        (
            (_TWO, "strategy.partition=tensor_parallel", "strategy.logical_devices=2x1"),
            {"replica": 2, "positions": 2, "logical": 2},
        ),
        (
            ("strategy.kind=multi_worker_mirrored", "strategy.virtual_devices=8"),
            {"replica": 2, "positions": 4},
        ),
        (("strategy.devices=['cpu:3', 'cpu:1']", _TWO), {"replica": 1, "positions": 2}),
        (("strategy.positions=1",), {"replica": 8, "logical": 1}),
    ],
)
def test_positions_are_an_axis_after_those_of_replicas_and_stages(
    entries: tuple[str, ...], mesh: dict[str, int]
) -> None:
    strategy = jobs.make_strategy(load(_NAME, *entries).values)
    assert dict(strategy.mesh.shape) == mesh


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (("data.sequence_length=20",), r"is 20, (.|\n)*into 8 parts(.|\n)*16 or 24, or(.|\n)*cont"),
        (("data.sequence_length=18",), r"Set data\.sequence_length to 16 or 24\.\n"),
        (
            ("data.sequence_length=18", "strategy.order=contiguous"),
            r"into 4 parts(.|\n)*to 16 or 20\.\n",
        ),
        (
            ("model.heads=2",),
            r"'ulysses', strategy\.positions is 4, and model\.heads is 2\.(.|\n)*heads to 4\.\n",
        ),
        (("model.attention=flash", "data.sequence_length=128"), r"'flash', and strategy\.pos"),
        (("model.split_residual=true",), r"split_residual is true, and strategy\.positions is 4"),
        (("model.experts=8",), r"'zigzag', (.|\n)*model\.experts is 8(.|\n)*'contiguous'"),
        (("strategy.attention=tree",), r"must be 'ulysses' or 'gather' or 'ring'"),
        (("strategy.order=random",), r"must be 'zigzag' or 'contiguous'"),
        (("strategy.positions=0",), r"strategy\.positions"),
        (("strategy.deterministic=true",), r"deterministic is true, and strategy\.positions is 4"),
        (("strategy.kind=parameter_server",), r"strategy\.positions is 4, of type int, and"),
    ],
)
def test_entries_that_do_not_fit_divided_positions_are_named(
    entries: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(_NAME, *entries)


@pytest.mark.parametrize("entry", ["positions=2", "attention=ring", "order=contiguous"])
def test_a_task_without_attention_has_no_positions(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"task is 'digits'(.|\n)*has no attention"):
        jobs.load_job_config(CONFIGS / "digits_mirrored.toml", [f"strategy.{entry}"])


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            ("strategy.devices=['cpu:0', 'cpu:1', 'cpu:2']", _TWO),
            r"strategy\.logical_devices times strategy\.positions is 2, and there are 3",
        ),
        (
            (
                "strategy.kind=multi_worker_mirrored",
                "strategy.virtual_devices=8",
                "strategy.positions=4",
                *STAGES,
                "strategy.stages=4",
                "model.layers=4",
            ),
            r"strategy\.stages times strategy\.positions is 16, and the processes have 8",
        ),
    ],
)
def test_positions_that_do_not_divide_the_devices_are_named(
    entries: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        jobs.make_strategy(load(_NAME, *entries).values)


@pytest.mark.parametrize(
    ("config", "entry", "words"),
    [
        (_NAME, _TWO, "is 15, and there are 4 replicas, whose devices divide positions"),
        ("experts", "strategy.experts=2", "whose devices divide experts(.|\n)*to 12 or 16"),
    ],
)
def test_replicas_whose_devices_divide_their_work_have_the_same_number_of_rows(
    config: str, entry: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_job(tmp_path, config, entry, "data.batch_size=15")


@pytest.mark.slow
def test_a_job_resumes_without_divided_positions(tmp_path: Path) -> None:
    whole = run_job(tmp_path / "whole", _NAME, "training.steps=4", *ONE)
    run_job(tmp_path / "parts", _NAME, "training.steps=2")
    run_job(tmp_path / "parts", _NAME, "training.steps=3", _TWO, _RING, *FSDP)
    found = run_job(tmp_path / "parts", _NAME, "training.steps=4", *ONE)
    np.testing.assert_allclose(found["losses"], whole["losses"], atol=1e-5)
    assert found["sample"] == whole["sample"]


_PLANNED = ("model.dropout=0", "data.batch_size=8", "model.remat=layers")


def test_a_plan_has_the_exchanges_of_positions() -> None:
    pytest.importorskip("libtpu")
    job = jobs.load_job(CONFIGS / "topics_lm_long_sequences.toml", _PLANNED)
    plan = jobs.plan_job(job, "v5e:2x4", quick=True)
    assert (plan.num_replicas, plan.num_logical) == (2, 4)
    assert "all-to-all" in str(plan)


def test_a_sweep_tries_positions_and_says_where_heads_do_not_divide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("libtpu")
    job = load(_NAME, *_PLANNED, _TWO, "model.heads=2").values
    monkeypatch.setattr(TopicsTask, "rules", property(lambda self: ("replicated",)))
    sweep = jobs.sweep_job(TopicsTask(job), "v5e:2x2")
    found = {c.positions: c for c in sweep.candidates}
    assert [*found] == [1, 2, 4]
    assert (found[2].num_replicas, found[2].num_logical) == (2, 2)
    assert found[1].plan
    assert found[2].plan
    assert found[4].plan is None
    assert "2 heads, on an axis of 4 devices" in found[4].reason
    assert "positions" in str(sweep)
    assert "stages" not in str(sweep)
