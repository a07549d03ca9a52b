"""Shows the progress of `fit`: a bar on a terminal or in a notebook, else a line per epoch."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from jaxdist._called import refuse
from jaxdist._reports import (
    LiveOutput,
    TerminalBar,
    has_notebook,
    is_in_cell,
    join_items,
    make_console,
    print_items,
    print_line,
)
from jaxdist._validate import show
from jaxdist.fit._loop.totals import Totals


def as_verbose(verbose: Any) -> int:
    """Return 0, 1 or 2."""
    if isinstance(verbose, str) and verbose == "auto":
        is_terminal = sys.stdout.isatty() and not is_in_cell()
        return 1 if is_terminal or has_notebook() else 2
    if isinstance(verbose, (bool, int)) and verbose in (0, 1, 2):
        return int(verbose)
    raise refuse(
        f"verbose={show(verbose)}.",
        "1 shows a bar, 2 prints a line for each epoch, 0 nothing; 'auto' is 1 on a terminal and "
        "in a notebook, and else 2.",
        "Pass 'auto', 0, 1 or 2.",
    )


def format_logs(logs: Mapping[str, float]) -> str:
    """Return names and values on one line."""
    return "  ".join(f"{name} {value:.4g}" for name, value in logs.items())


def print_result(logs: Mapping[str, float]) -> None:
    """Print the result of an evaluation."""
    print_items(make_console(), _format_items(logs))


class Progress:
    """A context manager that shows epochs, loss, metrics and time.

    Args:
        verbose: 0, 1 or 2.
        epochs: The number of the last epoch.
        num_steps: The steps of an epoch, or None.
        clock: Returns seconds from any origin. Tests pass their own.
    """

    def __init__(
        self,
        verbose: int,
        epochs: int,
        num_steps: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._verbose, self._epochs, self._num_steps = verbose, epochs, num_steps
        self._console = make_console()
        self._bar: TerminalBar | LiveOutput | None = None
        self._clock = clock
        self._began = clock()
        self._epoch = 0

    def __enter__(self) -> Self:
        if self._verbose == 1 and has_notebook():
            self._bar = LiveOutput(self._clock)
        elif self._verbose == 1:
            longest = f"epoch {self._epochs}/{self._epochs}"
            self._bar = TerminalBar(self._console, longest, self._clock)
        return self

    def __exit__(self, *_: object) -> None:
        # The bar of an unfinished epoch stays.
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @property
    def _title(self) -> str:
        return f"epoch {self._epoch + 1}/{self._epochs}"

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self._epoch, self._began = epoch, self._clock()
        if self._bar is not None:
            self._bar.draw(self._title, 0, self._num_steps)

    def advance(self, step: int, totals: Totals) -> None:
        """Move the bar, and show the loss of the steps that are fetched."""
        if self._bar is not None:
            texts = lambda: _format_items(totals.logs())  # noqa: E731
            self._bar.draw(self._title, step, self._num_steps, texts)

    def end(self, logs: Mapping[str, float]) -> None:
        """End an epoch: replace the bar by its logs, in as many lines as they need."""
        seconds = f"{self._clock() - self._began:.1f} s"
        if self._bar is not None:
            items = [self._title, seconds, *_format_items(logs)]
            self._bar.add_lines(join_items(items, self._console.width, "  ", indent=4))
        elif self._verbose == 2:
            print_items(self._console, [self._title, *_format_items(logs), seconds])

    def say(self, text: str) -> None:
        """Print a line above the bar; nothing for an empty string."""
        if self._bar is not None and text:
            self._bar.add_lines([text])
        elif self._verbose and text:
            print_line(self._console, text)


def _format_items(logs: Mapping[str, float]) -> list[str]:
    return [format_logs({name: value}) for name, value in logs.items()]
