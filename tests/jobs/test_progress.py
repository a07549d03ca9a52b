"""What is shown while a run trains."""

import io
import re
import threading

import pytest
from rich.console import Console

from jaxdist.jobs._run.progress import Stopwatch, TrainingProgress


class _Clock:
    """Seconds that the test moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _report(progress: TrainingProgress, step: int) -> None:
    progress.report(step, loss=0.25, speed=12345.6, seconds_left=3725.0)


def test_without_a_terminal_each_report_is_a_line_with_loss_throughput_and_time_left() -> None:
    out = io.StringIO()
    with TrainingProgress(600, console=Console(file=out, width=40), unit="images") as progress:
        _report(progress, 50)
    assert out.getvalue() == "step  50/600  loss 0.2500  12,346 images/s  1:02:05 left\n"


def test_other_numbers_of_a_step_are_shown_after_its_loss() -> None:
    out = io.StringIO()
    with TrainingProgress(600, console=Console(file=out, width=40), unit="bytes") as progress:
        progress.report(5, loss=0.5, speed=1.0, seconds_left=1.0, measures={"dropped": 0.125})
    assert out.getvalue() == "step   5/600  loss 0.5000  dropped 0.1250  1 bytes/s  0:00:01 left\n"


def test_on_a_terminal_there_is_a_bar_with_the_same_and_no_thread_is_left() -> None:
    before = threading.active_count()
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with TrainingProgress(600, first_step=10, console=console, unit="images") as progress:
        _report(progress, 50)
    shown = out.getvalue()
    assert "50/600" in shown
    assert "loss 0.2500" in shown
    assert "12,346 images/s" in shown
    assert "1:02:05 left" in shown
    assert threading.active_count() == before


def test_the_bar_is_taken_down_when_training_fails() -> None:
    before = threading.active_count()
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(KeyboardInterrupt), TrainingProgress(600, console=console, unit="images"):
        raise KeyboardInterrupt
    assert threading.active_count() == before


def test_the_bar_is_drawn_at_most_ten_times_a_second() -> None:
    clock, out = _Clock(), io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with TrainingProgress(600, console=console, clock=clock, unit="images") as progress:
        for step in range(1, 101):
            clock.now += 1 / 64
            progress.advance(step)
    # A draw is due after 0.1 s, so after every seventh of these steps; and there is a first and
    # a last one.
    assert out.getvalue().count("/600") <= 100 // 7 + 2
    assert "98/600" in out.getvalue()
    assert "100/600" in out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_shortens_the_numbers_and_not_the_steps(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with TrainingProgress(600, console=console, unit="images") as progress:
        _report(progress, 50)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    *_, last = [line.rstrip() for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert len(last) <= width
    assert last.startswith("step ")
    assert " 50/600 " in last


def test_a_bar_is_not_compiling_once_a_step_has_begun() -> None:
    clock, out = _Clock(), io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with TrainingProgress(600, console=console, clock=clock, unit="images") as progress:
        assert "compiling" in out.getvalue()
        clock.now += 1
        out.truncate(0)
        progress.advance(1)
    assert "1/600" in out.getvalue()
    assert "compiling" not in out.getvalue()


def test_the_stopwatch_leaves_pauses_out_and_starts_nothing_that_stood_still() -> None:
    clock = _Clock()
    watch = Stopwatch(clock)
    with watch.paused():
        clock.now += 1
    clock.now += 2
    watch.start()
    clock.now += 4
    with watch.paused():
        clock.now += 8
    clock.now += 16
    assert watch.seconds == 20
    watch.stop()
    clock.now += 32
    assert watch.seconds == 20
