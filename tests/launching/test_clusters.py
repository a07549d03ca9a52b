"""`jaxdist launch --ps`: parameter servers, workers and a chief."""

import json
import os
import pathlib
import re
import signal

import pytest

from jaxdist.cli import main
from tests.launching.launcher import is_gone, run_launcher, start_launcher, wait_until

_SCRIPT = """
import json, os, signal, sys, time, pathlib
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}_{task['index']}"
print("pid", os.getpid(), flush=True)
folder = pathlib.Path(sys.argv[1])
starts = len(list(folder.glob(f"{name}.*")))
(folder / f"{name}.{starts}").touch()
for variable in ("JAXDIST_SECRET", "JAXDIST_SNAPSHOT_DIRECTORY"):
    (folder / f"{variable}.{os.environ[variable].replace('/', '_')}").touch()
"""
_WAIT = "time.sleep(600)\n"


def _write(folder: pathlib.Path, source: str) -> str:
    path = folder / "cluster_script.py"
    path.write_text(_SCRIPT + source)
    return str(path)


def _find_pids(text: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, pid in re.findall(r"^\[(\w+ \d+)\] pid (\d+)$", text, re.MULTILINE):
        found.setdefault(name, []).append(int(pid))
    return found


def test_the_code_of_the_chief_is_that_of_the_launcher_and_nobody_is_left(
    tmp_path: pathlib.Path,
) -> None:
    script = _write(tmp_path, "if task['type'] != 'chief':\n    " + _WAIT + "sys.exit(7)")
    outcome = run_launcher("--ps", "1", "--workers", "2", script, str(tmp_path))
    assert outcome.exit_code == 7, outcome.describe()
    pids = _find_pids(outcome.stdout)
    assert set(pids) <= {"ps 0", "worker 0", "worker 1", "chief 0"}
    assert "chief 0" in pids
    assert all(is_gone(pid) for own in pids.values() for pid in own)
    assert "the chief ended with code 7" in outcome.stderr
    # All tasks have one secret, and one folder for snapshots.
    assert len(list(tmp_path.glob("JAXDIST_SECRET.*"))) == 1
    assert len(list(tmp_path.glob("JAXDIST_SNAPSHOT_DIRECTORY.*"))) == 1


def test_who_has_chosen_the_secret_is_told_how_another_worker_joins(
    tmp_path: pathlib.Path,
) -> None:
    script = _write(tmp_path, "if task['type'] != 'chief':\n    " + _WAIT)
    arguments = ("--ps", "1", "--workers", "2", script, str(tmp_path))
    assert "another worker joins" not in run_launcher(*arguments).stderr
    outcome = run_launcher(*arguments, env={"JAXDIST_SECRET": "a secret of this test, long enough"})
    found = re.search(r"joins with JAXDIST_ANNOUNCE=1 TF_CONFIG='(.*)' (.*)", outcome.stderr)
    assert found is not None, outcome.describe()
    config = json.loads(found[1])
    assert config["task"] == {"type": "worker", "index": 2}
    assert list(config["cluster"]["worker"]) == ["2"]
    assert len(config["cluster"]["ps"]) == 1
    assert script in found[2]
    assert "a secret" not in outcome.stderr


def test_a_killed_server_and_worker_start_again_while_the_others_go_on(
    tmp_path: pathlib.Path,
) -> None:
    script = _write(
        tmp_path,
        """
if task["type"] == "chief" or (name == "ps_0" and starts) or (name == "worker_1" and starts):
    pass
elif name in ("ps_0", "worker_1"):
    os.kill(os.getpid(), signal.SIGKILL)
if task["type"] != "chief":
    time.sleep(600)
while not ((folder / "ps_0.1").exists() and (folder / "worker_1.1").exists()):
    time.sleep(0.01)
""",
    )
    outcome = run_launcher("--ps", "1", "--workers", "2", script, str(tmp_path))
    assert outcome.exit_code == 0, outcome.describe()
    assert "ps 0 was ended by signal SIGKILL, and is started again" in outcome.stderr
    assert "worker 1 was ended by signal SIGKILL, and is started again" in outcome.stderr
    assert len(list(tmp_path.glob("worker_0.*"))) == 1


@pytest.mark.parametrize(
    ("end", "said", "code"),
    [
        ("sys.exit(3)", "worker 0 ended with code 3 while the chief ran", 3),
        ("sys.exit(0)", r"let the script call jaxdist.Server\(...\).join\(\) in them", 1),
        ("os.kill(os.getpid(), 9)", "It was killed 5 times within 10 s of its start", 137),
    ],
)
def test_a_worker_that_cannot_go_on_ends_the_job(
    tmp_path: pathlib.Path, end: str, said: str, code: int
) -> None:
    script = _write(tmp_path, f"if name == 'worker_0':\n    {end}\n{_WAIT}")
    outcome = run_launcher("--ps", "1", "--workers", "1", script, str(tmp_path))
    assert outcome.exit_code == code, outcome.describe()
    assert re.search(said, outcome.stderr)


def test_an_evaluator_goes_on_when_the_chief_has_ended_and_is_started_again(
    tmp_path: pathlib.Path,
) -> None:
    script = _write(
        tmp_path,
        """
assert "evaluator" not in json.loads(os.environ["TF_CONFIG"])["cluster"]
if name == "worker_0":
    (pathlib.Path(os.environ["JAXDIST_LAUNCHER"]) / "finished").touch()
elif name == "chief_0":
    # A server that is ended before it listens to SIGTERM would not say so to the evaluator.
    while not ((folder / "evaluator_0.0").exists() and (folder / "listening").exists()):
        time.sleep(0.01)
elif name == "evaluator_0":
    # Until the launcher has ended the server, which it does when the chief has ended.
    while not (folder / "ended").exists():
        time.sleep(0.01)
    if not starts:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(5)
else:
    signal.signal(signal.SIGTERM, lambda *_: ((folder / "ended").touch(), sys.exit(0)))
    (folder / "listening").touch()
    time.sleep(600)
""",
    )
    arguments = ("--ps", "1", "--workers", "1", "--evaluator", script, str(tmp_path))
    outcome = run_launcher(*arguments)
    assert outcome.exit_code == 5, outcome.describe()
    assert "evaluator 0 was ended by signal SIGKILL, and is started again" in outcome.stderr
    assert "evaluator 0 ended with code 5 when the chief had ended" in outcome.stderr
    assert "worker 0" not in outcome.stderr
    assert all(is_gone(pid) for own in _find_pids(outcome.stdout).values() for pid in own)


def test_a_chief_that_fails_starts_again_as_often_as_it_may(tmp_path: pathlib.Path) -> None:
    script = _write(tmp_path, f"if name == 'chief_0':\n    sys.exit(0 if starts else 4)\n{_WAIT}")
    arguments = ("--ps", "1", "--workers", "1", "--restarts", "1", script, str(tmp_path))
    outcome = run_launcher(*arguments)
    assert outcome.exit_code == 0, outcome.describe()
    assert "Restart 1 of 1" in outcome.stderr
    assert len(list(tmp_path.glob("ps_0.*"))) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_all(tmp_path: pathlib.Path, number: int) -> None:
    script = _write(tmp_path, _WAIT)
    with start_launcher("--ps", "1", "--workers", "1", script, str(tmp_path)) as job:
        wait_until(lambda: len(list(tmp_path.glob("*_0.0"))) == 3, 60)
        os.kill(job.pids[0], number)
        (outcome,) = job.wait(60)
    assert outcome.exit_code == 128 + number, outcome.describe()
    # The chief alone gets it, so there is one traceback and not one for each task.
    interrupted = re.findall(r"^\[(.*?)\] KeyboardInterrupt", outcome.stderr, re.M)
    assert interrupted == (["chief 0"] if number == signal.SIGINT else [])
    assert all(is_gone(pid) for own in _find_pids(outcome.stdout).values() for pid in own)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "2", "x.py"), "--workers, and no --ps"),
        (("--ps", "1", "x.py"), "no number of workers"),
        (("--chief", "1", "--workers", "1", "x.py"), "no number of parameter servers"),
        (("--ps", "1", "--workers", "1", "-n", "2", "x.py"), "--ps 1 and -n"),
        (("--ps", "1", "--workers", "1", "--module", "m", "x.py"), "no --plain-servers"),
        (("--ps", "1", "--workers", "1", "--snapshot-seconds", "5", "-m", "json"), "seconds= to"),
        (("--snapshot-seconds", "5", "x.py"), "no --ps"),
        (("--evaluator", "x.py"), "--evaluator, and no --ps"),
        (
            ("--ps", "1", "--workers", "1", "--evaluator", "--print", "slurm", __file__),
            "--evaluator and --print slurm",
        ),
        (
            ("--ps", "1", "--workers", "1", "--evaluator", "--on", "ray", __file__),
            "--evaluator and --on ray",
        ),
        (("--ps", "1", "--workers", "1"), "was given no script"),
        (("--ps", "0", "--workers", "1", __file__), "--ps=0"),
    ],
)
def test_options_that_do_not_fit_together_are_named(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_script_of_the_page_on_parameter_servers_trains(tmp_path: pathlib.Path) -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "machines" / "parameter-servers.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    (source,) = [block for block in blocks if "TF_CONFIG" in block]
    script = tmp_path / "train.py"
    script.write_text(source)
    outcome = run_launcher("--ps", "1", "--workers", "2", str(script), timeout=110)
    assert outcome.exit_code == 0, outcome.describe()
    assert "[chief 0] 12800.0 100" in outcome.stdout.splitlines()
