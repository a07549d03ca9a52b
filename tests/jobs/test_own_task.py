"""`task = "module:Class"`: a task in a module of the user, and each mistake in its name."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxdist
from jaxdist import jobs
from jaxdist.cli import main
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConfigError,
    JaxdistError,
    ShapeError,
)
from tests.jobs.own_task import write_own_task
from tests.strategies.oracle import refused


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The configuration of a task in the current directory, which can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield write_own_task(tmp_path)
    for name in ("sine", "faulty"):
        sys.modules.pop(name, None)


def _rename(config: Path, task: str) -> None:
    first, *rest = config.read_text().splitlines()
    assert first == 'task = "sine:SineTask"'
    config.write_text("\n".join([f"task = {task!r}", *rest]))


def test_a_configuration_makes_the_task_of_the_user_and_knows_its_own_entries(config: Path) -> None:
    loaded = jobs.load_job_config(config, ["model.width=16"])
    assert (loaded.values.task, loaded.values.model.width) == ("sine:SineTask", 16)
    kind = importlib.import_module("sine").SineTask
    assert jobs.kind_of(loaded.values) is kind
    job = jobs.load_job(config)
    assert type(job) is kind
    assert job.rows_per_replica == 8
    assert type(job.with_rules("fsdp")) is kind
    config.write_text(config.read_text().replace("width", "widht"))
    with pytest.raises(ConfigError, match=r"line 4: unknown key 'widht'(.|\n)*mean 'width'"):
        jobs.load_job(config)


def test_a_configuration_can_be_made_in_a_program_and_names_the_task(config: Path) -> None:
    sine = importlib.import_module("sine")
    assert jobs.kind_of(sine.SineConfig(task="sine:SineTask")) is sine.SineTask
    assert type(sine.SineTask(sine.SineConfig())) is sine.SineTask
    with refused(ConfigError, "config: there is no task ''", "'module:Class' of your own"):
        jobs.kind_of(sine.SineConfig())


def test_a_plan_a_training_and_a_run_with_other_values_read_the_task(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["training.steps=4", "optimizer.warmup_steps=0", "output.picture="]
    words = [word for entry in sets for word in ("--set", entry)]
    assert main(["train", str(config), *words]) == 0
    assert "steps 4  replicas 8" in capsys.readouterr().out
    assert main(["train", str(config), *words]) == 0
    assert capsys.readouterr().out.startswith("finished before, at step 4")
    assert main(["train", str(config), *words, "--set", "model.width=8"]) == 2
    assert "model.width: saved 64, now 8" in capsys.readouterr().err
    assert main(["plan", str(config), "--topology", "v5e:1x1", "--quick"]) == 0
    assert capsys.readouterr().out.startswith("Plan of train_step for v5e:1x1")


def test_a_directory_of_another_task_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["training.steps=1", "optimizer.warmup_steps=0", "output.picture="]
    words = [word for entry in sets for word in ("--set", entry)]
    assert main(["train", str(config), *words]) == 0
    other = config.with_name("digits.toml")
    other.write_text('[checkpoint]\ndirectory = "runs/sine/checkpoints"\n')
    assert main(["train", str(other), *words]) == 2
    assert "task: saved 'sine:SineTask', now 'digits'" in capsys.readouterr().err


def test_the_command_finds_a_task_in_its_directory_and_installed_modules_before_it(
    config: Path,
) -> None:
    config.with_name("optax.py").write_text("raise SystemExit('the file in this directory')")
    command = str(Path(sys.executable).with_name("jaxdist"))
    found = subprocess.run(
        [command, "train", str(config), "--set", "model.widht=8"],
        cwd=config.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 2, found.stderr
    assert "mean 'width'" in found.stderr


FAULTY = """
import jaxdist.jobs
from jaxdist.jobs import Task
class Half(Task):
    title = "half"
    examples = unit = "rows"
    def batch(self, rows): ...
    def load(self): ...
    def measures(self, means): ...
NUMBER = 3
"""
ROWS = {
    "a word": ("sin", "line 1: there is no task 'sin'", "'topics_lm', and 'module:Class' of your"),
    "no module": (
        "sines:SineTask",
        "importing sines failed: No module named 'sines'",
        "PYTHONPATH",
    ),
    "a file": ("sine.py:SineTask", "importing sine.py failed: No module named 'sine.py'", "folder"),
    "a path": ("./sine:SineTask", "task is './sine:SineTask'", "module:Class"),
    "no class": ("sine:", "task is 'sine:'", 'task = "my_tasks:WineTask"'),
    "two": ("sine:SineTask:x", "task is 'sine:SineTask:x'", "as in an import statement"),
    "another name": ("sine:Sine", "Sine of sine does not exist", 'task = "sine:SineTask"'),
    "another class": (
        "sine:Net",
        "Net of sine is <class 'sine.Net'>",
        "a subclass of jaxdist.jobs",
    ),
    "a number": ("faulty:NUMBER", "NUMBER of faulty is 3, of type int", 'task = "faulty:Half"'),
    "incomplete": (
        "faulty:Half",
        "does not define curve, in_words, headline, train_step, evaluation_step, make_model.",
        "Define curve in the class",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_name_that_selects_no_task_is_refused_with_the_line(config: Path, row: str) -> None:
    task, *parts = ROWS[row]
    _rename(config, task)
    config.with_name("faulty.py").write_text(FAULTY)
    with refused(ConfigError, f"{config}, line 1: ", *parts) as caught:
        jobs.load_job(config)
    assert str(caught.value).count("\n\n") == 2


def test_a_fault_in_the_module_of_the_task_keeps_its_own_error(config: Path) -> None:
    _rename(config, "faulty:SineTask")
    faulty = config.with_name("faulty.py")
    faulty.write_text("import no_such_package\n")
    with pytest.raises(ConfigError, match="importing faulty failed: No module named 'no_such_pac"):
        jobs.load_job(config)
    faulty.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        jobs.load_job(config)


WRONG: dict[str, tuple[Callable[[], object], type[JaxdistError], str]] = {
    "change": (
        lambda: jobs.entry(1, change="often"),  # type: ignore[arg-type]
        ArgumentError,
        "jobs.entry was given change='often'",
    ),
    "only_if": (
        lambda: jobs.entry(1, only_if=("update", 3)),
        ArgumentTypeError,
        "jobs.entry was given only_if=('update', 3)",
    ),
    "kind": (
        lambda: jobs.section(jobs.TrainingConfig()),  # type: ignore[arg-type]
        ArgumentTypeError,
        "jobs.section was given kind=TrainingConfig(",
    ),
    "default": (
        lambda: jobs.section(jobs.TrainingConfig, step=3),
        ArgumentError,
        "jobs.section was given step=3",
    ),
    "fraction": (
        lambda: jobs.split_rows([[1], [2]], 1.0, 0),
        ArgumentError,
        "jobs.split_rows was given test_fraction=1.0",
    ),
    "one row": (
        lambda: jobs.split_rows({"x": np.ones(1)}, 0.5, 0),
        ShapeError,
        "jobs.split_rows was given arrays with one row",
    ),
    "rows that differ": (
        lambda: jobs.split_rows({"x": np.ones(2), "y": np.ones(1)}, 0.5, 0),
        ShapeError,
        "jobs.split_rows was given arrays",
    ),
    "rows of data that differ": (
        lambda: jobs.Data(np.ones(2), {"x": np.ones(2), "y": np.ones(1)}, {}),
        ShapeError,
        "jobs.Data was given arrays",
    ),
    "identity": (
        lambda: jobs.Data(np.ones(2), np.ones(1), 3),  # type: ignore[arg-type]
        ArgumentTypeError,
        "jobs.Data was given identity=3",
    ),
    "table": (
        lambda: jobs.Table(jaxdist.Variable(1.0)),  # type: ignore[arg-type]
        ArgumentTypeError,
        "jobs.Table was given make=",
    ),
    "task": (
        lambda: jobs.JobConfig(task=3),  # type: ignore[arg-type]
        ArgumentError,
        "jobs.JobConfig was given task=3",
    ),
}


@pytest.mark.parametrize("row", WRONG)
def test_a_wrong_argument_of_a_part_of_a_task_is_named(row: str) -> None:
    call, error, words = WRONG[row]
    with refused(error, words):
        call()
