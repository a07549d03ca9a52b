"""The driver's processes: what they answer, and that they end."""

import os
import sys
import time

import pytest

from benchmarks._bench import Bench, Options
from benchmarks._group import ArmGroup
from benchmarks._process import ArmError, ArmProcess
from tests.benchmarks import arms_under_test as arms


def is_running(pid: int) -> bool:
    """Whether a process is there, and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def arm_process() -> ArmProcess:
    """A child that imports no JAX."""
    return ArmProcess(sys.executable, devices=None)


def test_arm_answers_calls_and_times_its_loop():
    with arm_process() as process:
        assert process.call(arms.double, value=21) == 42
        process.make(arms.sleeper, seconds=0.01)
        wall, cpu = process.burst(3)
        assert process.facts() == {"steps": 3}
    assert 0.01 <= wall < 1
    assert cpu < wall


def test_what_an_arm_prints_does_not_reach_the_answers():
    with arm_process() as process:
        assert process.call(arms.chatty) == "answer"


def test_error_in_an_arm_comes_with_its_traceback_and_the_arm_goes_on():
    with arm_process() as process:
        with pytest.raises(ArmError, match="planted fault"):
            process.call(arms.fails)
        assert process.call(arms.double, value=1) == 2


def test_arm_that_dies_is_an_error_with_what_it_printed():
    with arm_process() as process, pytest.raises(ArmError, match=r"code 7.*\n.*last words"):
        process.call(arms.dies)


def test_arm_that_hangs_is_an_error_and_is_ended():
    with arm_process() as process:
        with pytest.raises(ArmError, match=r"no answer within 0\.5 s"):
            process.call(arms.hangs, timeout_s=0.5)
    assert not is_running(process.pid)


def test_group_calls_all_its_processes_and_times_the_slowest():
    group = ArmGroup(sys.executable, devices=None, count=2)
    try:
        assert group.call(arms.told_apart) == [0, 2]
        group.make(arms.slow_second)
        wall, cpu = group.burst(2)
        assert wall >= 0.05
        assert cpu < wall
    finally:
        group.close()


def test_failure_of_one_process_ends_the_wait_for_the_others():
    group = ArmGroup(sys.executable, devices=None, count=2)
    start = time.monotonic()
    try:
        with pytest.raises(ArmError, match="planted fault"):
            group.call(arms.first_hangs_second_fails)
    finally:
        group.close()
    # `first_hangs_second_fails` sleeps for 600 s.
    assert time.monotonic() - start < 300


def test_children_end_with_the_bench():
    with Bench(Options()) as bench, bench.row("1"):
        pids = [bench.process("a").pid, *bench.group("b", 2).pids]
        assert all(map(is_running, pids))
        assert os.path.isdir(bench.folder)
    assert not any(map(is_running, pids))
    assert not os.path.exists(bench.folder)


def test_children_end_when_the_driver_fails():
    pids = []

    def measure() -> None:
        with Bench(Options()) as bench, bench.row("1"):
            pids.extend(bench.process(name).pid for name in "ab")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert not any(is_running(pid) for pid in pids)


def test_child_ends_when_the_driver_is_killed():
    """A killed driver closes the pipes, and that alone has to be enough."""
    code = (
        "import sys\n"
        "from benchmarks._process import ArmProcess\n"
        "process = ArmProcess(sys.executable, devices=None)\n"
        "print(process.pid, flush=True)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    read, write = os.pipe()
    driver = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", code],
        {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)],
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        child = int(pipe.readline())
    os.waitpid(driver, 0)
    deadline = time.monotonic() + 20
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)
