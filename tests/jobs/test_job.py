"""A configuration as a job without data: the planned step is the trained step."""

import pytest

import jaxdist
from jaxdist import jobs

CONFIG = "configs/digits_mirrored.toml"


@pytest.mark.parametrize("rules", ["replicated", "sharded_update"])
def test_the_step_of_a_job_is_the_step_that_training_runs(rules: str) -> None:
    strategy = jaxdist.MirroredStrategy()
    update = {"replicated": "replicated", "sharded_update": "sharded"}[rules]
    job = jobs.load_job(CONFIG, [f"optimizer.update={update}"])
    assert job.rules[0] == rules
    rows = {k: x[:16] for k, x in job.load().train.items()}
    batch = next(iter(strategy.experimental_distribute_dataset([rows])))
    real = strategy.lower(job.train_step, (*job.build(strategy), batch))
    abstract = job.lower(strategy, rows=2, rules=rules)
    assert abstract.inputs == real.inputs
    assert abstract.results == real.results
    assert [c.kind for c in abstract.collectives] == [c.kind for c in real.collectives]


def test_rows_of_a_replica_are_those_of_the_configured_replicas() -> None:
    overrides = ["data.batch_size=96", "strategy.virtual_devices=4"]
    assert jobs.load_job(CONFIG, overrides).rows_per_replica == 24


_TWO = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
_ONE = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"TF_CONFIG": _TWO}, "TF_CONFIG describes"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2 describes"),
        ({"TF_CONFIG": _ONE}, None),
        ({"TF_CONFIG": "{"}, None),
        ({"JAXDIST_CLUSTER": "none", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, None),
        ({}, None),
    ],
)
def test_a_job_of_one_process_warns_if_it_is_one_of_several(
    environment: dict[str, str],
    found: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    jobs.make_strategy(jobs.load_job_config(CONFIG).values)
    warnings = [r.getMessage() for r in caplog.records if "trains alone" in r.getMessage()]
    assert len(warnings) == (found is not None)
    assert all(str(found) in text for text in warnings)
