"""The lock of a folder, with real processes: of other jobs, of the same job, and killed ones."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxdist._checkpoints import folder_lock
from jaxdist._checkpoints.folder_lock import JOB_ID, JobLock
from jaxdist.errors import CheckpointError

ROOT = Path(__file__).parents[2]
# Without the packages around the module: they import JAX, and take seconds.
HOLD = """
import sys, types
for name in "jaxdist", "jaxdist.training":
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [sys.argv[2] + "/" + name.replace(".", "/")]
from jaxdist.errors import CheckpointError
from jaxdist._checkpoints.folder_lock import JobLock
try:
    lock = JobLock(sys.argv[1]).__enter__()
except CheckpointError as error:
    print("refused", str(error).splitlines()[0], flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
"""
# A child that its parent leaves behind, as workers of data loaders are.
FORK = HOLD.replace(
    '    print("held", flush=True)\n',
    """    import os
    print("held", flush=True)
    if os.fork() == 0:
        print("forked", flush=True)
        sys.stdin.readline()
        os._exit(0)
""",
)


class _Holders:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[subprocess.Popen[str]] = []

    def start(self, job: str | None = None, code: str = HOLD) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k != JOB_ID}
        environment.update(PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
        if job is not None:
            environment[JOB_ID] = job
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(self.folder), str(ROOT)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        return child

    def end(self) -> None:
        for child in self.children:
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()  # ends what it forked, too
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[_Holders]:
    made = _Holders(tmp_path / "run")
    yield made
    made.end()


def _said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_job_keeps_others_out_until_its_last_process_ends(holders: _Holders) -> None:
    first, second = holders.start("a"), holders.start("a")
    assert (_said(first), _said(second)) == ("held", "held")
    with pytest.raises(
        CheckpointError, match=rf"in use|process \d+ on .*, since .*(\n|.)*{JOB_ID}"
    ):
        JobLock(holders.folder).__enter__()
    first.kill()
    first.wait()
    with pytest.raises(CheckpointError):
        JobLock(holders.folder).__enter__()
    assert _said(holders.start("b")).startswith("refused Another job uses")
    second.send_signal(signal.SIGKILL)
    second.wait()
    with JobLock(holders.folder):
        assert _said(holders.start("a")).startswith("refused Another job uses")


def test_what_a_killed_process_has_forked_holds_no_lock(holders: _Holders) -> None:
    parent = holders.start(code=FORK)
    assert (_said(parent), _said(parent)) == ("held", "forked")
    with pytest.raises(CheckpointError):
        JobLock(holders.folder).__enter__()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    with JobLock(holders.folder):
        pass


def test_one_process_shares_its_own_lock_and_lets_go_with_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JobLock(tmp_path):
        with JobLock(tmp_path):
            pass
        monkeypatch.setenv(JOB_ID, "another")
        with pytest.raises(CheckpointError, match=str(os.getpid())):
            JobLock(tmp_path).__enter__()
    with JobLock(tmp_path):
        pass


def test_a_file_system_that_cannot_lock_is_told_and_nobody_is_kept_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level("WARNING", "jaxdist"), JobLock(tmp_path):
        assert "is not locked: [Errno 95] Operation not supported" in caplog.text
    monkeypatch.setattr(folder_lock, "_import_fcntl", lambda: None)
    with caplog.at_level("WARNING", "jaxdist"), JobLock(tmp_path):
        assert "this system has no flock" in caplog.text
