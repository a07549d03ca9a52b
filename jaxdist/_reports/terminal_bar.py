"""Shows a bar with items on a terminal."""

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

from jaxdist._reports.lines import print_line
from jaxdist._reports.notebook import SECONDS_BETWEEN_UPDATES


class TerminalBar:
    """A bar below printed lines; `LiveOutput` has the same methods, for a notebook.

    No thread refreshes it. The bar moves at most every 0.1 s; lines and the end are always drawn.

    Args:
        console: The console of the terminal.
        longest: The longest title. Bars of all titles begin in the same column.
        clock: Returns seconds from any origin. Tests pass their own.
    """

    def __init__(
        self, console: Console, longest: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._console, self._clock = console, clock
        # Only the last column is shortened: it ends with dots if the screen is too narrow.
        first = Column(no_wrap=True, min_width=len(longest))
        last = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._bar = Progress(
            TextColumn("{task.fields[title]}", table_column=first, markup=False),
            BarColumn(bar_width=min(40, console.width // 4)),
            MofNCompleteColumn(),
            TextColumn("{task.description}", table_column=last, markup=False),
            console=console,
            auto_refresh=False,
            expand=True,
        )
        self._task: TaskID | None = None
        self._pending: tuple[str, int, int | None, Callable[[], Sequence[str]]] | None = None
        self._drawn = -float("inf")
        self._bar.start()

    def draw(
        self,
        title: str,
        done: int,
        total: int | None,
        make_texts: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Draw the bar of a running part, followed by items; see `LiveOutput.draw`."""
        self._pending = title, done, total, make_texts
        if self._clock() - self._drawn >= SECONDS_BETWEEN_UPDATES:
            self._send(refresh=True)

    def add_lines(self, lines: Sequence[str]) -> None:
        """Replace the bar with lines."""
        self._pending = None
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self._bar.refresh()
        print_line(self._console, "\n".join(lines))

    def close(self) -> None:
        """Draw what is pending. A bar that is drawn stays."""
        if self._pending is not None:
            # `stop` draws it.
            self._send(refresh=False)
        self._bar.live.transient = not self._bar.tasks
        self._bar.stop()

    def _send(self, *, refresh: bool) -> None:
        if self._pending is None:
            return
        (title, done, total, make_texts), self._pending = self._pending, None
        text = "  ".join(make_texts())
        if self._task is None:
            # This draws it, too.
            self._task = self._bar.add_task(text, total=total, completed=done, title=title)
        else:
            self._bar.update(
                self._task, completed=done, description=text, title=title, refresh=refresh
            )
        self._drawn = self._clock()
