"""The expected time of a plan: the schedule of its program, at efficiencies of the chip."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxdist import cost, jobs
from jaxdist._planning import make_target, predict_expected
from jaxdist.jobs._plan import _make_source
from tools import published

CONFIGS = Path(__file__).parents[2] / "configs"
_SMALL = (
    "strategy.partition=fsdp_in_slice",
    "strategy.whole_below=0",
    "model.layers=2",
    "model.width=128",
    "model.heads=2",
    "model.hidden=256",
    "model.scan_layers=true",
    "model.attention=flash",
    "model.dtype=bfloat16",
    "data.sequence_length=128",
    "data.batch_size=8",
)


def _compile(topology: str) -> tuple[str, Any, Any]:
    job = jobs.load_job(CONFIGS / "topics_lm_data_parallel.toml", _SMALL)
    source = _make_source(job, job.rules[0])
    target = make_target(topology, 1, source.axes, source.communication)
    program = source.lower(target.strategy, source.rows)
    return program.compile().as_text(), program.layout, target.device


@pytest.mark.slow
def test_the_times_of_more_slices_follow_from_the_program_for_two() -> None:
    for_two, for_four = _compile("v5e:2x2*2"), _compile("v5e:2x2*4")
    derived = predict_expected(*for_two, num_slices=4)
    compiled = predict_expected(*for_four)
    assert dataclasses.astuple(derived) == pytest.approx(dataclasses.astuple(compiled), rel=1e-3)
    assert derived.outer > predict_expected(*for_two).outer > 0


def test_a_plan_has_an_expected_time_that_is_longer_than_its_bounds() -> None:
    job = jobs.load_job(CONFIGS / "digits_mirrored.toml", ["model.channels=[4]"])
    plan = jobs.plan_job(job, "v5e:2x2", quick=True)
    assert plan.expected is not None
    assert plan.times is not None
    assert plan.expected.outer == 0
    assert plan.expected.inner > 0
    assert plan.expected.seconds > plan.times.bound
    assert plan.expected.work > plan.times.compute / cost.EFFICIENCY.matrix
    assert "Expected: " in str(plan)
    assert "waits for DCN" not in str(plan)


def test_efficiencies_are_parts_with_a_source() -> None:
    fields = {f.name for f in dataclasses.fields(cost.EFFICIENCY)}
    parts = fields - {"sources", "kernel_seconds"}
    for chip in cost.CHIPS.values():
        found = cost.efficiency_of(chip)
        assert all(0 < getattr(found, name) <= 1 for name in parts)
        assert found.sources.keys() == parts | (
            {"kernel_seconds"} if found.kernel_seconds else set()
        )
        assert (found.kernel_seconds > 0) == (chip.platform == "gpu")


def test_configurations_of_published_models_have_the_shapes_of_maxtext() -> None:
    # `global_parameter_scale`, and the published sizes in parameters.
    scales = {"v5e_16b": (16, 15.8), "v5e_64b": (64, 62.8), "v5p_64b": (64, 62.8)}
    scales["v5p_512b"] = (512, 499.2)
    assert {path.stem for path in published.CONFIGS.iterdir()} == scales.keys()
    for name, (scale, billions) in scales.items():
        model: Any = jobs.load_job(published.CONFIGS / f"{name}.toml").config.model
        base, rest = divmod(scale.bit_length() - 1, 3)
        assert model.layers == 16 << base
        assert model.heads == 16 << base + (rest > 0)
        assert model.hidden == 7168 << base + (rest > 0)
        assert model.width == 2048 << base + (rest > 1)
        assert (model.head_dim, model.vocabulary) == (128, 32_000)
        flops = published.count_model_flops(model, 1, 1) - 12 * model.heads * 128 * model.layers
        count = flops // 6 + model.width * model.vocabulary  # the embedding is a lookup
        assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_page_has_a_row_for_each_published_run() -> None:
    lines = [line for line in published.PAGE.read_text().splitlines() if line.startswith("| v5")]
    assert len(lines) == len(published.RUNS)
    for line, run in zip(lines, published.RUNS, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:2] == [run.config, f"{run.slices} x {run.topology}"]
        assert float(cells[2]) == run.tflops
        assert abs(float(cells[3]) / run.tflops - 1) < 0.2
        assert (cells[4] == "fitted") == run.fitted


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_row_of_16b_on_two_slices_is_that_of_the_page() -> None:
    run = next(r for r in published.RUNS if r.config == "v5e_16b" and r.slices == 2)
    row = published.format_row(run, *published.predict(run))
    found = [cell.strip() for cell in row.split("|")]
    line = next(x for x in published.PAGE.read_text().splitlines() if x.startswith(row[:28]))
    # Another version of libtpu may compile another program.
    assert float(found[4]) == pytest.approx(float(line.split("|")[4]), rel=0.03)
