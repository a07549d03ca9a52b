"""How a job ends: the launcher's exit code, the first cause last, and no process that is left."""

import pathlib
import signal

import pytest

from tests.launching.launcher import (
    QUICK,
    check_nobody_is_left,
    find_pids,
    is_gone,
    run_launcher,
    start_launcher,
    wait_until,
    write_script,
)

SLEEP = "\n    time.sleep(100)\n"


def test_a_job_that_finishes_is_quiet(tmp_path: pathlib.Path) -> None:
    script = write_script(tmp_path, "print('done', *sys.argv[1:])")
    outcome = run_launcher("-n", "3", script, "--lr", "0.1", "-n", "7")
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    lines = sorted(line for line in outcome.stdout.splitlines() if "done" in line)
    assert lines == [f"[{i}] done --lr 0.1 -n 7" for i in range(3)]
    check_nobody_is_left(outcome, 3)


def test_the_traceback_of_the_process_that_failed_first_comes_last(tmp_path: pathlib.Path) -> None:
    script = write_script(
        tmp_path,
        """
        if index == 1:
            try:
                {}["no key"]
            except KeyError as error:
                raise ValueError("planted in 1") from error
        time.sleep(100)
        """,
    )
    outcome = run_launcher("-n", "3", *QUICK, script)
    assert outcome.exit_code == 1
    report = outcome.stderr[outcome.stderr.index("jaxdist launch: process 1 failed first") :]
    assert "with exit code 1:\nTraceback" in report
    assert "KeyError: 'no key'" in report
    assert outcome.stderr.endswith("\nValueError: planted in 1\n")
    assert "were ended: 0 (ended by jaxdist launch), 2 (ended by jaxdist launch)" in outcome.stderr
    check_nobody_is_left(outcome, 3)


@pytest.mark.parametrize(
    ("how", "code", "part"),
    [
        ("sys.exit(3)", 3, "process 0 failed first, with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "process 0 was ended by signal SIGKILL"),
        ("os.abort()", 134, "process 0 was ended by signal SIGABRT"),
    ],
)
def test_the_exit_code_is_that_of_the_first_cause(
    tmp_path: pathlib.Path, how: str, code: int, part: str
) -> None:
    script = write_script(
        tmp_path,
        f"""
        started = {str(tmp_path / "started")!r}
        if index == 0:
            wait_for(started)
            {how}
        pathlib.Path(started).touch()
        time.sleep(100)
        """,
    )
    outcome = run_launcher("-n", "2", *QUICK, script)
    assert outcome.exit_code == code
    assert part in outcome.stderr[outcome.stderr.rindex("jaxdist launch: ") :]
    check_nobody_is_left(outcome, 2)


def test_an_error_about_another_process_is_not_the_cause_though_it_came_first(
    tmp_path: pathlib.Path,
) -> None:
    script = write_script(
        tmp_path,
        """
        if index == 0:
            raise UnavailableError("process 1 has ended.\\n\\nThe rule.")
        wait_for(os.environ["JAXDIST_LAUNCHER"] + "/0.ended")
        raise ValueError("planted in 1")
        """,
    )
    outcome = run_launcher("-n", "2", "--report-seconds", "20", script)
    assert outcome.exit_code == 1
    assert "jaxdist launch: process 1 failed first" in outcome.stderr
    assert outcome.stderr.endswith("\nValueError: planted in 1\n")
    assert "were ended: 0 (code 1)" in outcome.stderr


def test_a_process_that_leaves_with_code_0_in_the_middle_is_the_cause(
    tmp_path: pathlib.Path,
) -> None:
    script = write_script(
        tmp_path,
        """
        if index == 1:
            sys.exit(0)
        ended = wait_for(os.environ["JAXDIST_LAUNCHER"] + "/1.ended").read_text()
        raise UnavailableError(f"process 1 has ended ({ended}).")
        """,
    )
    outcome = run_launcher("-n", "3", script)
    assert outcome.exit_code == 1
    assert "jaxdist.errors.UnavailableError: process 1 has ended (code 0)." in outcome.stderr
    last = outcome.stderr[outcome.stderr.rindex("jaxdist launch: ") :]
    assert "process 1 ended with exit code 0 in the middle of the job" in last
    assert "UnavailableError" not in last


def test_the_others_can_read_which_signal_ended_a_process(tmp_path: pathlib.Path) -> None:
    script = write_script(
        tmp_path,
        """
        if index == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        print(wait_for(os.environ["JAXDIST_LAUNCHER"] + "/0.ended").read_text())
        """,
    )
    outcome = run_launcher("-n", "2", script)
    assert outcome.exit_code == 137
    assert "[1] signal SIGKILL" in outcome.stdout


def test_a_process_that_does_not_answer_is_the_cause(tmp_path: pathlib.Path) -> None:
    script = write_script(
        tmp_path,
        """
        if index == 1:
            print("stops", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise UnavailableError("process 1 is silent. Its stack: ...")
        """,
    )
    outcome = run_launcher("-n", "2", *QUICK, script)
    assert outcome.exit_code == 1
    assert "jaxdist launch: process 1 did not answer" in outcome.stderr
    check_nobody_is_left(outcome, 2)


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_period(
    tmp_path: pathlib.Path,
) -> None:
    script = write_script(
        tmp_path,
        f"""
        if index == 0:
            signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
            pathlib.Path({str(tmp_path / "ready")!r}).touch()
            while True:
                time.sleep(0.01)
        wait_for({str(tmp_path / "ready")!r})
        sys.exit(5)
        """,
    )
    outcome = run_launcher("-n", "2", *QUICK, script)
    assert outcome.exit_code == 5
    assert "[0] no\n" in outcome.stdout
    check_nobody_is_left(outcome, 2)


def test_processes_that_a_process_started_end_with_it(tmp_path: pathlib.Path) -> None:
    # The second has left the group, and holds the pipe: the launcher does not wait for it.
    script = write_script(
        tmp_path,
        """
        one = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        print("pid", one.pid)
        sleep = "import time; time.sleep(3)"
        two = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
        print("outside", two.pid)
        """,
    )
    outcome = run_launcher("-n", "1", script, timeout=20)
    assert outcome.exit_code == 0
    wait_until(lambda: all(map(is_gone, find_pids(outcome.stdout))))


def test_when_the_launcher_is_killed_no_process_is_left(tmp_path: pathlib.Path) -> None:
    script = write_script(tmp_path, "print('ready', flush=True)\ntime.sleep(100)")
    with start_launcher("-n", "2", script) as job:
        job.wait_for_line(0, "[0] ready")
        job.wait_for_line(0, "[1] ready")
        pids = find_pids("\n".join(job.lines(0)))
        assert len(pids) == 2
        assert not any(map(is_gone, pids))
        job.kill(0, signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, pids)))
