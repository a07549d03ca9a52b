"""What all tasks share: the registry, the section `[strategy]`, and the table of partitions."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jaxdist
from jaxdist import jobs
from jaxdist.cli import main
from jaxdist.data import batches
from jaxdist.errors import ArgumentTypeError, ConfigError
from jaxdist.jobs import PARTITIONS, TASKS, StrategyConfig
from jaxdist.jobs._partitions import list_like

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
OF_TASKS = {jobs.load_job_config(path).values.task: path for path in reversed(CONFIGS)}
# Entries that make the tests fast.
SMALL = {
    "digits": ("model.channels=[4]", "model.hidden=32"),
    "next_word": (
        "strategy.kind=auto",
        "model.rows=1024",
        "model.width=64",
        "model.classes=16",
    ),
    "tabular_regression": ("data.rows=300", "model.hidden=64"),
    "topics_lm": (
        "model.layers=1",
        "model.width=16",
        "model.hidden=32",
        "data.sequence_length=16",
        "data.stride=64",
        "data.test_fraction=0.01",
    ),
}


def _load(task: str, *overrides: str) -> jobs.Task[Any]:
    chosen = [*SMALL.get(task, ()), "optimizer.warmup_steps=0", *overrides]
    return jobs.load_job(OF_TASKS[task], chosen)


# The registry


def test_every_folder_of_jobs_is_a_task_and_has_a_configuration_of_its_name() -> None:
    folders = (ROOT / "jaxdist" / "jobs").glob("[!_]*/__init__.py")
    assert set(TASKS) == {path.parent.name for path in folders}
    assert set(OF_TASKS) == set(TASKS)
    for name, kind in TASKS.items():
        config = kind.config_type()
        assert config.task == name
        assert jobs.kind_of(config) is kind
        assert type(kind(config)) is kind


def test_the_configuration_of_another_task_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="config is a DigitsConfig"):
        TASKS["digits"](TASKS["topics_lm"].config_type())
    with pytest.raises(ArgumentTypeError, match=r"jobs\.kind_of was given config=3"):
        jobs.kind_of(3)  # type: ignore[arg-type]


# One section for all


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_the_same_entries_of_the_strategy(task: str) -> None:
    asked = TASKS[task].config_type().strategy
    assert type(asked) is StrategyConfig
    page = (ROOT / "docs" / "how-to" / "tasks.md").read_text()
    for field in dataclasses.fields(asked):
        assert f"| `{field.name}` |" in page


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("entries", "kind", "shape"),
    [
        (["virtual_devices=4"], jaxdist.MirroredStrategy, {"replica": 4}),
        (["virtual_devices=v5e:2x2"], jaxdist.TPUStrategy, {"replica": 4}),
        (["devices=['cpu:3','cpu:1']"], jaxdist.MirroredStrategy, {"replica": 2}),
        (
            ["virtual_devices=4", "partition=fsdp_in_slice", "slices=2"],
            jaxdist.MirroredStrategy,
            {"slice": 2, "replica": 2},
        ),
    ],
    ids=["number", "slice", "listed", "slices"],
)
def test_the_section_makes_the_same_strategy_for_every_task(
    task: str, entries: list[str], kind: type[Any], shape: dict[str, int]
) -> None:
    config = _load(task, *(f"strategy.{entry}" for entry in entries)).config
    strategy = jobs.make_strategy(config)
    assert type(strategy) is kind
    assert dict(strategy.mesh.shape) == {**shape, "logical": 1}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("devices", ["2", "v5e:1x2"])
def test_deterministic_has_8_virtual_replicas_on_2_devices(task: str, devices: str) -> None:
    entries = [f"strategy.virtual_devices={devices}", "strategy.deterministic=true"]
    strategy = jobs.make_strategy(_load(task, *entries).config)
    assert (strategy.num_replicas_in_sync, strategy.mesh.size) == (8, 2)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["deterministic=true", "partition=fsdp"], r"is true, and strategy\.partition is 'fsdp'"),
        (["logical_devices=2"], r"2 devices of a replica would all do the same work"),
        (["logical_devices=2x"], r"'2x', which is neither a number nor a shape"),
        (["slices=2", "partition=fsdp"], r"partition to 'fsdp_in_slice'"),
        (["virtual_devices=v5e:3x2"], r"--set strategy\.virtual_devices=v5e:3x2: "),
        (["virtual_devices=0"], r"virtual_devices must lie between 1 and 1024, and 0"),
        (["virtual_devices=true"], r"--set strategy\.virtual_devices=true: "),
        (["partition=pieces"], r"must be 'replicated' or 'tensor_parallel' or 'fsdp' or"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "words",
)
def test_entries_that_contradict_each_other_are_refused_for_every_task(
    task: str, entries: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _load(task, *(f"strategy.{entry}" for entry in entries))


@pytest.mark.parametrize("task", ["digits", "tabular_regression"])
def test_a_task_without_layers_to_split_refuses_partitions_that_split(task: str) -> None:
    entries = ["strategy.partition=fsdp_tensor_parallel", "strategy.logical_devices=2"]
    with pytest.raises(ConfigError, match=rf"task is '{task}'(.|\n)*partition to 'fsdp'"):
        _load(task, *entries)
    assert not any(PARTITIONS[r].is_split for r in _load(task).rules if r in PARTITIONS)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("rules", ["fsdp", "sharded_update"])
def test_sharded_state_has_the_losses_of_replicated_state(task: str, rules: str) -> None:
    losses = []
    for name in ("replicated", rules):
        job = _load(task, "strategy.virtual_devices=4", "strategy.whole_below=0").with_rules(name)
        strategy = jobs.make_strategy(job.config)
        model, optimizer = job.build(strategy)
        source = batches(job.data.train, 16, drop_remainder=True)
        with iter(strategy.experimental_distribute_dataset(source)) as data:
            args = ((model, optimizer, next(data)) for _ in range(3))
            losses.append([float(strategy.run(job.train_step, a)) for a in args])
        shards = [x.addressable_shards[0].data.size for x in jax.tree.leaves(nnx.state(model))]
        whole = [x.size for x in jax.tree.leaves(nnx.state(model))]
        assert (sum(shards) < sum(whole)) == (name == "fsdp")
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


# The table of partitions


def test_configurations_plans_and_help_read_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    job = _load("topics_lm")
    assert set(PARTITIONS) <= set(job.rules)
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    with pytest.raises(ConfigError) as caught:
        _load("digits", "strategy.partition=other")
    for name in PARTITIONS:
        assert name in text
        assert repr(name) in str(caught.value)
        assert job.with_rules(name).config.strategy.partition == name


@given(st.sampled_from(sorted(PARTITIONS)), st.booleans())
def test_a_similar_partition_differs_in_what_was_asked_only(name: str, is_split: bool) -> None:
    found = list_like(name, is_split=is_split)
    assert found
    for similar in found:
        before, after = (dataclasses.asdict(PARTITIONS[n]) for n in (name, similar))
        changed = {key for key in before if before[key] != after[key]} - {"make_rules"}
        assert changed <= {"is_split"}
        assert PARTITIONS[similar].is_split == is_split


def test_the_help_of_train_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert ", ".join(TASKS) in " ".join(capsys.readouterr().out.split())
