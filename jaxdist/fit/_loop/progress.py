"""Shows the progress of `fit`: a bar on a terminal or in a notebook, else a line per epoch."""

import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from jaxdist._called import refuse
from jaxdist._reports import (
    LiveOutput,
    has_notebook,
    is_in_cell,
    join_items,
    make_console,
    print_items,
    print_line,
)
from jaxdist._validate import show
from jaxdist.fit._loop.totals import Totals

_SECONDS_BETWEEN_DRAWINGS = 0.1


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

    No thread refreshes the bar: it moves when a step is dispatched.

    Args:
        verbose: 0, 1 or 2.
        epochs: The number of the last epoch.
        num_steps: The steps of an epoch, or None.
    """

    def __init__(self, verbose: int, epochs: int, num_steps: int | None) -> None:
        self._verbose, self._epochs, self._num_steps = verbose, epochs, num_steps
        self._console = make_console()
        self._bar: Bar | None = None
        self._output: LiveOutput | None = None
        self._task: Any = None
        self._began = self._drawn = time.perf_counter()
        self._epoch = 0

    def __enter__(self) -> Self:
        if self._verbose == 1 and has_notebook():
            self._output = LiveOutput()
        elif self._verbose == 1:
            # Only the last column is shortened: it ends with dots if the screen is too narrow.
            title = f"epoch {self._epochs}/{self._epochs}"
            first = Column(no_wrap=True, min_width=len(title))
            last = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            columns = (
                TextColumn("{task.fields[epoch]}", table_column=first),
                BarColumn(bar_width=min(40, self._console.width // 4)),
                MofNCompleteColumn(),
                TextColumn("{task.description}", table_column=last),
            )
            self._bar = Bar(*columns, console=self._console, auto_refresh=False, expand=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The bar of an unfinished epoch stays.
        if self._output is not None:
            self._output.close()
            self._output = None
        if self._bar is not None:
            self._bar.live.transient = not self._bar.tasks
            self._bar.stop()
            self._bar = None

    @property
    def _title(self) -> str:
        return f"epoch {self._epoch + 1}/{self._epochs}"

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self._epoch, self._began = epoch, time.perf_counter()
        if self._output is not None:
            self._output.draw(self._title, 0, self._num_steps)
        elif self._bar is not None:
            self._task = self._bar.add_task("", total=self._num_steps, epoch=self._title)

    def advance(self, step: int, totals: Totals) -> None:
        """Move the bar, at most every 0.1 s, and show the loss of the steps that are fetched."""
        if self._output is not None:
            texts = lambda: _format_items(totals.logs())  # noqa: E731
            self._output.draw(self._title, step, self._num_steps, texts)
        elif self._bar is not None:
            now = time.perf_counter()
            if now - self._drawn >= _SECONDS_BETWEEN_DRAWINGS:
                text = format_logs(totals.logs())
                self._bar.update(self._task, completed=step, description=text, refresh=True)
                self._drawn = now

    def end(self, logs: Mapping[str, float]) -> None:
        """End an epoch: replace the bar by its logs, in as many lines as they need."""
        seconds = f"{time.perf_counter() - self._began:.1f} s"
        if self._output is None and self._bar is None:
            if self._verbose == 2:
                print_items(self._console, [self._title, *_format_items(logs), seconds])
            return
        items = [self._title, seconds, *_format_items(logs)]
        lines = join_items(items, self._console.width, "  ", indent=4)
        if self._output is not None:
            self._output.add_lines(lines)
        elif self._bar is not None:
            self._bar.remove_task(self._task)
            self._bar.refresh()
            print_line(self._console, "\n".join(lines))

    def say(self, text: str) -> None:
        """Print a line above the bar; nothing for an empty string."""
        if self._output is not None and text:
            self._output.add_lines([text])
        elif self._verbose and text:
            print_line(self._console, text)


def _format_items(logs: Mapping[str, float]) -> list[str]:
    return [format_logs({name: value}) for name, value in logs.items()]
