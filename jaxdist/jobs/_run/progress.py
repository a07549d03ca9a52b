"""Shows a run: its description, and its progress as a bar or as plain lines."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import jax
from flax import nnx
from rich.console import Console

from jaxdist._program import Program
from jaxdist._reports import LiveOutput, TerminalBar, can_redraw, is_of_notebook, print_line
from jaxdist._strategies import Strategy
from jaxdist._values import from_state, is_sharded_leaf
from jaxdist.jobs._config.schema import JobConfig
from jaxdist.jobs._task import Task

# The usual names of collectives whose primitives have other names.
_WORDS = {"psum": "all-reduce", "psum_scatter": "reduce-scatter", "ppermute": "permute"}


def describe_run(config: JobConfig, task: Task[Any], strategy: Strategy, model: nnx.Module) -> str:
    """Describe the model and the devices of a run.

    For instance: topics: 271,456 parameters on 4 replica(s) of 2 cpu device(s), 32 windows a step.
    """
    mesh = strategy.mesh.devices
    count = strategy.num_replicas_in_sync
    # With `deterministic`, several virtual replicas share a device.
    share = f"{mesh.size // count} " if mesh.size >= count else f"1/{count // mesh.size} "
    return (
        f"{task.title}: {count_parameters(model):,} parameters on {count} replica(s) of {share}"
        f"{mesh.flat[0].platform} device(s), {config.data.batch_size} {task.examples} a step"
    )


def describe_communication(program: Program) -> str:
    """Describe the collectives of a step, by kind.

    For instance: all-reduce of 1,085,956 bytes between 8 replicas.
    """
    totals: dict[str, int] = {}
    for asked in program.traced_collectives:
        # A collective in a loop with an unknown number of iterations counts once.
        kind = _WORDS.get(asked.kind, asked.kind.replace("_", "-"))
        totals[kind] = totals.get(kind, 0) + asked.bytes_per_device * (asked.times or 1)
    layout = program.layout
    if not totals or layout.num_replicas == 1:
        between = "nothing is sent between replicas"
    else:
        listed = ", ".join(f"{kind} of {size:,} bytes" for kind, size in sorted(totals.items()))
        between = f"{listed} between {layout.num_replicas} replicas"
    if layout.num_logical == 1:
        return between
    return f"{between}; and what the compiler adds between the {layout.num_logical} devices of each"


def count_parameters(model: nnx.Module) -> int:
    """Return the number of elements of all parameters."""
    state = nnx.state(model, nnx.Param)
    leaves = jax.tree.leaves(state, is_leaf=is_sharded_leaf)
    return sum(math.prod(from_state(leaf).shape) for leaf in leaves)


class Stopwatch:
    """Adds up the seconds between each `start` and `stop`.

    Args:
        clock: Returns seconds from any origin. Tests pass their own.

    Example:
        >>> watch = Stopwatch(clock=iter([10.0, 12.5, 20.0, 21.0]).__next__)
        >>> watch.start(); watch.stop(); watch.start(); watch.stop(); watch.seconds
        3.5
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since: float | None = None
        self._total = 0.0

    def start(self) -> None:
        """Start, or do nothing if it is running."""
        if self._since is None:
            self._since = self._clock()

    def stop(self) -> None:
        """Stop, or do nothing if it is stopped."""
        if self._since is not None:
            self._total += self._clock() - self._since
            self._since = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop during the body. Start after it if it was running before."""
        was_running = self._since is not None
        self.stop()
        yield
        if was_running:
            self.start()

    @property
    def seconds(self) -> float:
        """The seconds up to now."""
        return self._total + (0.0 if self._since is None else self._clock() - self._since)


class TrainingProgress:
    """A context manager that shows loss, throughput and remaining time.

    Shows a bar on a terminal and in a notebook. Elsewhere `report` prints a line.

    Args:
        num_steps: The steps of the whole training.
        first_step: The steps that earlier runs completed.
        console: The console to print to.
        unit: The unit of the throughput.
        clock: Returns seconds from any origin. Tests pass their own.

    Example:
        >>> import sys
        >>> console = Console(file=sys.stdout, width=80)
        >>> with TrainingProgress(400, console=console, unit="images") as progress:
        ...     progress.report(20, loss=0.5, speed=1000.0, seconds_left=83.0)
        step  20/400  loss 0.5000  1,000 images/s  0:01:23 left
    """

    def __init__(
        self,
        num_steps: int,
        *,
        first_step: int = 0,
        console: Console,
        unit: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._console = console
        self._unit = unit
        self._clock = clock
        self._num_steps = num_steps
        self._first_step = first_step
        self._bar: TerminalBar | LiveOutput | None = None
        self._items: Sequence[str] = ("compiling",)

    def __enter__(self) -> Self:
        if is_of_notebook(self._console):
            self._bar = LiveOutput(self._clock)
        elif can_redraw(self._console):
            self._bar = TerminalBar(self._console, "step", self._clock)
        self._draw(self._first_step)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def advance(self, step: int) -> None:
        """Move the bar. Without a bar, do nothing."""
        if self._items == ("compiling",):
            self._items = ()
        self._draw(step)

    def report(
        self,
        step: int,
        *,
        loss: float,
        speed: float,
        seconds_left: float,
        measures: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Show the step with its loss, its other measures, the throughput and the time left."""
        left = max(0, round(seconds_left))
        clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        shown = [f"{name} {x:.4f}" for name, x in {"loss": loss, **measures}.items()]
        self._items = [*shown, f"{speed:,.0f} {self._unit}/s", clock]
        if self._bar is None:
            width = len(str(self._num_steps))
            parts = [f"step {step:>{width}}/{self._num_steps}", *self._items]
            print_line(self._console, "  ".join(parts))
        self._draw(step)

    def _draw(self, step: int) -> None:
        if self._bar is not None:
            items = self._items
            self._bar.draw("step", step, self._num_steps, lambda: items)
