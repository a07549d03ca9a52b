"""What `explain` says of a pipeline, and of the axes of its collectives."""

from typing import Any

import jax
import pytest

import jaxdist
from jaxdist import nn, partition
from jaxdist.partition import Replicate, Rules, Stage
from tests.nn.pipelines import make_batch, make_params, pipeline, strategy_of

RULES = Rules([("layers/**", Stage())], otherwise=Replicate())


def lower(micro_batches: int, **options: Any) -> Any:
    strategy = strategy_of({"data": 2, "stage": 4})
    params = partition.place(strategy, make_params(), RULES)
    rows = jax.device_put(make_batch(), strategy.per_replica_sharding)

    def step(params: Any, rows: Any) -> Any:
        loss = pipeline(micro_batches, **options)
        found = jax.value_and_grad(loss)(params, rows)
        return jaxdist.get_replica_context().all_reduce("mean", found)

    return strategy.lower(step, (params, rows))


def explain(micro_batches: int, **options: Any) -> Any:
    return lower(micro_batches, **options).explain()


def test_a_report_has_the_schedule_the_slots_and_the_axes() -> None:
    report = explain(8)
    [(call, line, facts)] = report.work
    assert call == "nn.pipeline_loss"
    assert "pipelines.py" in line
    found = dict(facts)
    assert found["schedule"] == "1f1b, 4 stages x 8 micro-batches"
    assert found["residuals kept"].startswith("7 on a stage, ")
    assert found["sent to a neighbour"] == "at most 22 times 128 bytes"
    assert "better" not in found
    axes = {(row.kind, row.axes) for row in report.compiled}
    assert ("collective-permute", ("stage",)) in axes
    assert ("all-reduce", ("data",)) in axes
    assert "  waiting              37.5% of the working time" in str(report)


def test_a_plan_for_tpus_has_the_schedule_and_the_axes() -> None:
    program = lower(8)
    plan = program.compile_for("v5e:2x4", quick=True)
    assert plan.work == program.explain().work
    axes = {(row.kind, row.axes): row.runs for row in plan.traffic}
    assert axes["collective-permute", ("stage",)] == 22
    assert ("all-reduce", ("data",)) in axes
    text = str(plan)
    assert "  ticks                11 F, 11 B" in text
    assert "  link  kind                axis   runs" in text


def test_a_report_of_few_micro_batches_says_how_many_give_each_stage_work() -> None:
    [(_, _, facts)] = explain(2).work
    assert dict(facts)["better"] == "micro_batches=4 or more, so that every stage has work"


def test_a_report_tells_whether_the_head_is_split() -> None:
    [(_, _, facts)] = explain(8, head=nn.vocabulary_head(lambda rows: rows["labels"])).work
    assert dict(facts)["head"] == "split over the stages: 2 heads instead of 8"


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_head_with_weights_returns_a_sum(reduce: str) -> None:
    head = nn.vocabulary_head(
        lambda rows: rows["labels"], weights=lambda rows: 1.0 + 0 * rows["labels"]
    )
    loss = pipeline(4, head=head, reduce=reduce)
    if reduce == "sum":
        whole = pipeline(1, head=head, reduce=reduce)(make_params(), make_batch())
        assert float(loss(make_params(), make_batch())) == pytest.approx(float(whole), rel=1e-6)
        return
    with pytest.raises(jaxdist.errors.ArgumentError, match="Pass reduce='sum'"):
        loss(make_params(), make_batch())


def test_a_head_with_a_norm_takes_a_pair() -> None:
    head = nn.vocabulary_head(lambda rows: rows["labels"], norm=lambda scale, x: x * scale)
    with pytest.raises(jaxdist.errors.ArgumentTypeError, match="are a pair"):
        pipeline(4, head=head)(make_params(), make_batch())
