"""Signals to the launcher reach the processes."""

import pathlib
import signal

import pytest

from tests.launching.launcher import check_nobody_is_left, start_launcher, write_script

READY = "print('ready', flush=True)\ntime.sleep(100)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_after_a_signal_all_processes_end_and_the_code_is_128_and_its_number(
    tmp_path: pathlib.Path, number: signal.Signals
) -> None:
    with start_launcher("-n", "2", write_script(tmp_path, READY)) as job:
        job.wait_for_line(0, "[0] ready")
        job.wait_for_line(0, "[1] ready")
        job.kill(0, number)
        (outcome,) = job.wait(20)
    assert outcome.exit_code == 128 + number
    assert f"jaxdist launch: ended by {number.name}" in outcome.stderr
    assert ("[0] KeyboardInterrupt" in outcome.stderr) == (number == signal.SIGINT)
    check_nobody_is_left(outcome, 2)


SAVE = """
import threading
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
print("ready", flush=True)
asked.wait(50)
if index == 0:
    wait_for(FOLDER + "/go")
print("saved", flush=True)
sys.exit(42)
"""


def test_after_sigterm_a_process_has_the_time_that_it_needs(tmp_path: pathlib.Path) -> None:
    script = write_script(tmp_path, SAVE.replace("FOLDER", repr(str(tmp_path))))
    with start_launcher("-n", "2", "--report-seconds", "0", "--grace-seconds", "0", script) as job:
        job.wait_for_line(0, "[0] ready")
        job.wait_for_line(0, "[1] ready")
        job.kill(0, signal.SIGTERM)
        job.wait_for_line(0, "[1] saved")
        (tmp_path / "go").touch()
        job.wait_for_line(0, "[0] saved")
        (outcome,) = job.wait(20)
    assert outcome.exit_code == 143


def test_a_second_ctrl_c_kills(tmp_path: pathlib.Path) -> None:
    script = write_script(
        tmp_path,
        """
        signal.signal(signal.SIGINT, lambda *_: print("not yet", flush=True))
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
        """,
    )
    with start_launcher("-n", "2", script) as job:
        job.wait_for_line(0, "[0] ready")
        job.wait_for_line(0, "[1] ready")
        job.kill(0, signal.SIGINT)
        job.wait_for_line(0, "[0] not yet")
        job.wait_for_line(0, "[1] not yet")
        job.kill(0, signal.SIGINT)
        (outcome,) = job.wait(20)
    assert outcome.exit_code == 130
    check_nobody_is_left(outcome, 2)
