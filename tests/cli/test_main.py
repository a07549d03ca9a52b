"""The command line: exit codes, and errors without a traceback."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxdist.cli import _commands, main
from jaxdist.cli._train import format_final_line, format_interrupted_line
from jaxdist.errors import ConfigError
from jaxdist.jobs import TrainingReport


def _report(**changes: Any) -> TrainingReport:
    given: dict[str, Any] = {
        "steps": 600,
        "num_replicas": 8,
        "unit": "images",
        "evaluation": {"accuracy": 0.9916},
        "headline": "accuracy 99.16%",
        "units_per_s": 12345.6,
        "was_interrupted": False,
        "next_step": 600,
    }
    return TrainingReport(**{**given, **changes})


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "train" in out
    assert "info" in out


def test_version_names_jaxdist_and_jax(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("jaxdist ")


@pytest.mark.parametrize(
    "arguments", [["new", "/proc/x"], ["examples", "/proc/x"], ["train", "no_such_file.toml"]]
)
def test_an_error_has_the_name_of_the_command_once(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    name = f"jaxdist {arguments[0]}"
    assert said.startswith(name)
    assert not said.removeprefix(name).removeprefix(": ").startswith(name)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ([], ""),
        (["trian"], ""),
        (["train"], " train"),
        (["train", "x.toml", "--sett", "a"], " train"),
        (["info", "extra"], " info"),
        (["bench", "collectives", "--x"], " bench collectives"),
    ],
)
def test_arguments_that_are_not_understood_exit_with_2_and_the_usage_of_their_command(
    arguments: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"usage: jaxdist{command} [-h] [" in capsys.readouterr().err


def test_our_errors_are_a_message_on_stderr_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "no_such.toml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxdist train: The configuration file 'no_such.toml'")
    assert "Traceback" not in captured.err


def test_with_traceback_our_errors_are_raised() -> None:
    with pytest.raises(ConfigError):
        main(["train", "no_such.toml", "--traceback"])


def test_more_cpu_devices_than_jax_has_started_with_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have = len(jax.devices("cpu"))
    config = Path(__file__).parents[2] / "configs" / "digits_mirrored.toml"
    monkeypatch.chdir(tmp_path)
    change = f"strategy.virtual_devices={2 * have}"
    assert main(["train", str(config), "--set", change]) == 2
    told = capsys.readouterr().err
    assert f"virtual_devices({2 * have})" in told
    assert f"{have} CPU device(s)" in told
    assert list(tmp_path.iterdir()) == []


def test_with_traceback_ctrl_c_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxdist.cli._bench.parse_size", interrupt)
    with pytest.raises(KeyboardInterrupt):
        main(["bench", "collectives", "--traceback"])


def test_ctrl_c_before_training_exits_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(_commands, "train", stopped)
    assert main(["train", str(tmp_path)]) == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().err


def test_unknown_keys_reach_the_user_with_option_and_nearest_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[training]\nstep = 3\n")
    assert main(["train", str(path), "--set", "data.bach_size=8"]) == 2
    err = capsys.readouterr().err
    assert f"{path}, line 2: unknown key 'step' in [training]" in err
    assert "--set data.bach_size=8: unknown key 'bach_size'" in err
    assert "Did you mean 'batch_size'?" in err


def test_the_last_line_says_accuracy_steps_replicas_and_images_per_second() -> None:
    assert format_final_line(_report()) == "accuracy 99.16%  steps 600  replicas 8  images/s 12,346"
    assert "images/s n/a" in format_final_line(_report(units_per_s=None))


def test_an_interrupted_run_says_where_it_stopped_and_where_the_next_one_starts() -> None:
    line = format_interrupted_line(_report(steps=137, next_step=100), Path("runs/checkpoints"))
    assert "after step 137" in line
    assert "resumes from step 100: runs/checkpoints/100" in line
    line = format_interrupted_line(_report(steps=3, next_step=None), Path("runs"))
    assert "starts from the beginning" in line


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback(
    tmp_path: Path,
) -> None:
    (tmp_path / "old.py").write_text("import jax\n" + "jax.pmap(f)\n" * 200)
    command = [sys.executable, "-m", "jaxdist", "lint", str(tmp_path), "--format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ran:
        assert ran.stdout is not None
        assert ran.stderr is not None
        ran.stdout.close()
        assert ran.stderr.read() == b""
    assert ran.returncode == 141


def test_another_pipe_than_the_output_that_breaks_keeps_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that ends, for instance, is no reader of the output that has seen enough."""
    reader, writer = os.pipe()
    os.close(reader)

    def write(arguments: object) -> int:
        return os.write(writer, b"x")

    monkeypatch.setattr(_commands, "train", write)
    with tempfile.TemporaryFile("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        try:
            with pytest.raises(BrokenPipeError):
                main(["train", "job.toml"])
        finally:
            os.close(writer)
