"""The prefetch thread: how far it reads ahead, and that it always ends."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxdist.data import InputOptions, batches, distribute_dataset
from jaxdist.errors import ContextError, ShapeError
from tests.layouts import make_layout

PATIENCE_S = 30


def _distribute(source: Any, depth: int = 1) -> Any:
    layout = make_layout(2)
    options = InputOptions(experimental_per_replica_buffer_size=depth)
    return distribute_dataset(source, layout, options)


# Those that began before the test: iterators of other tests may still be held.
_EARLIER: set[threading.Thread] = set()


def _running() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t not in _EARLIER]


def _all_end(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(PATIENCE_S)
    return not any(t.is_alive() for t in threads)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    _EARLIER.update(_running())
    yield
    gc.collect()
    assert _all_end(_running()), "this test left a prefetch thread"


class Counting:
    """An endless source that counts what was read, and lets a test wait for it."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = threading.Condition()

    def __iter__(self) -> Iterator[np.ndarray]:
        while True:
            with self.changed:
                self.count += 1
                self.changed.notify_all()
            yield np.full(2, self.count - 1)

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, PATIENCE_S)


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_no_more_than_the_depth_is_read_ahead_and_that_much_is(depth: int) -> None:
    source = Counting()
    with iter(_distribute(source, depth)) as iterator:
        for taken in range(1, 6):
            next(iterator)
            source.wait_for(taken + depth)
            assert source.count == taken + depth
    # The thread has ended, so this is all that it ever read.
    assert source.count == 5 + depth


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_asking_for_the_spec_reads_one_element_and_starts_no_thread(depth: int) -> None:
    source = Counting()
    data = _distribute(source, depth)
    assert data.element_spec.shape == (1,)
    assert source.count == 1
    assert _running() == []
    with iter(data) as iterator:
        assert np.asarray(next(iterator).array).tolist() == [0, 0]
        source.wait_for(1 + depth)
    assert source.count == 1 + depth


def test_an_iterator_that_was_never_asked_has_no_thread() -> None:
    iterator = iter(_distribute(Counting()))
    assert _running() == []
    del iterator


@pytest.mark.parametrize("depth", [0, -1])
def test_without_reading_ahead_there_is_no_thread(depth: int) -> None:
    iterator = iter(_distribute(Counting(), depth))
    next(iterator)
    assert _running() == []


def test_the_thread_has_ended_when_the_data_has() -> None:
    assert len(list(_distribute([np.zeros(2)] * 3))) == 3
    assert _running() == []


def test_the_thread_has_ended_after_close() -> None:
    iterator = iter(_distribute(Counting()))
    next(iterator)
    assert len(_running()) == 1
    iterator.close()
    assert _running() == []


def test_the_thread_ends_when_a_loop_is_left_half_way() -> None:
    threads = []
    for _ in _distribute(Counting()):
        threads = _running()
        break
    assert len(threads) == 1
    assert _all_end(threads)


def test_the_thread_ends_when_the_iterator_is_dropped() -> None:
    iterator = iter(_distribute(Counting(), 3))
    next(iterator)
    threads = _running()
    del iterator
    assert _all_end(threads)


def test_the_thread_ends_when_an_iterator_in_a_cycle_is_collected() -> None:
    iterator = iter(_distribute(Counting()))
    next(iterator)
    threads = _running()
    cycle: list[Any] = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    gc.collect()
    assert _all_end(threads)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_thread_ends_when_the_step_raises(error: type[BaseException]) -> None:
    threads: list[threading.Thread] = []

    def train() -> None:
        for _ in _distribute(Counting()):
            threads.extend(_running())
            raise error

    with pytest.raises(error):
        train()
    assert len(threads) == 1
    assert _all_end(threads)


def test_ctrl_c_while_waiting_for_data_arrives_at_once_and_ends_the_thread() -> None:
    release = threading.Event()

    def source() -> Iterator[np.ndarray]:
        yield np.zeros(2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        # Holds the element back, so that the consumer is still waiting for it.
        release.wait(PATIENCE_S)
        yield np.ones(2)

    iterator = iter(_distribute(source))
    threads: list[threading.Thread] = []
    # The signal may arrive as soon as the first batch is there, before the second is asked for.
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        next(iterator)
        threads = _running()
        next(iterator)
    assert not release.is_set()
    release.set()
    iterator.close()
    assert _all_end(threads or _running())
    with pytest.raises(ContextError, match="closed"):
        next(iterator)


def _failing(count: int, error: BaseException) -> Iterator[np.ndarray]:
    for i in range(count):
        yield np.full(2, i)
    raise error


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_error_of_the_source_arrives_after_the_batches_before_it(count: int, depth: int) -> None:
    iterator = iter(_distribute(_failing(count, OSError("disk")), depth))
    given = [np.asarray(next(iterator).array)[0] for _ in range(count)]
    assert given == list(range(count))
    with pytest.raises(OSError, match="disk") as caught:
        next(iterator)
    assert "_failing" in "".join(traceback.format_exception(caught.value))
    assert any(f"batch {count}" in note for note in caught.value.__notes__)
    assert _running() == []
    with pytest.raises(ContextError, match="OSError ended it"):
        next(iterator)


def test_an_exit_in_the_source_arrives_as_an_exit() -> None:
    iterator = iter(_distribute(_failing(1, SystemExit(3))))
    next(iterator)
    with pytest.raises(SystemExit):
        next(iterator)
    assert _running() == []


def test_an_error_in_a_batch_ends_the_thread_and_closes_the_source() -> None:
    closed: list[threading.Thread] = []

    def source() -> Iterator[np.ndarray]:
        try:
            yield np.zeros(2)
            yield np.zeros(())
        finally:
            closed.append(threading.current_thread())

    with pytest.raises(ShapeError, match="element 1"):
        list(_distribute(source))
    (thread,) = closed
    assert thread is not threading.main_thread()
    assert _running() == []


@pytest.mark.parametrize("depth", [0, 1])
def test_closing_runs_the_finally_of_a_generator_that_was_made_for_the_pass(depth: int) -> None:
    closed = []

    def source() -> Iterator[np.ndarray]:
        try:
            while True:
                yield np.zeros(2)
        finally:
            closed.append(True)

    with iter(_distribute(source, depth)) as iterator:
        next(iterator)
    assert closed == [True]


def test_a_generator_of_the_user_is_left_open() -> None:
    generator = (np.full(2, i) for i in range(9))
    with iter(_distribute(generator, 0)) as iterator:
        next(iterator)
    assert next(generator).tolist() == [1, 1]


def test_many_abandoned_passes_leave_no_thread() -> None:
    data = _distribute(batches(np.arange(64), 2, repeat=None), 2)
    for _ in range(50):
        next(iter(data))
    gc.collect()
    assert _all_end(_running())


def test_a_program_that_ends_with_a_pass_open_ends_well() -> None:
    program = """
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import numpy as np
        import jaxdist
        from jaxdist.data import batches
        data = jaxdist.MirroredStrategy().experimental_distribute_dataset(
            batches(np.zeros((64, 784)), 64, repeat=None)
        )
        iterator = iter(data)
        next(iterator)
        print("done")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    assert "Error" not in ended.stderr
