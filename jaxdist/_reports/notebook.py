"""Supports notebooks: detects kernels and cells, formats lines as HTML, updates an output."""

import html
import importlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxdist._reports.colours import colour_html

# Cells of JupyterLab, Colab and VS Code have room for this many columns; longer lines would wrap.
COLUMNS = 100
SECONDS_BETWEEN_UPDATES = 0.1
# Each update sends the whole output, so a long training begins a new one after this many lines.
_MOST_LINES = 100


def _find_shell() -> Any:
    """Return the IPython shell of this process, or None."""
    # Look it up, never import it: if it is not loaded, this is not a kernel.
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if find is None else find()


def is_kernel() -> bool:
    """Return whether this process is the kernel of a notebook; IPython in a terminal is not."""
    return getattr(_find_shell(), "kernel", None) is not None


def name_cells(text: str) -> str:
    """Replace files of cells in a string with `In[4]`, as in tracebacks."""
    find_name = getattr(getattr(_find_shell(), "compile", None), "format_code_name", None)
    if find_name is None:
        return text

    def name(found: re.Match[str]) -> str:
        # A label ("Cell") and a name, or None for other files.
        names = find_name(found[0])
        return found[0] if names is None else str(names[1])

    return re.sub(r"[^\s:]+\.py\b", name, text)


def has_notebook() -> bool:
    """Return whether this process is a kernel whose output goes to a cell.

    False inside `contextlib.redirect_stdout` and `%%capture`.
    """
    return is_kernel() and not isinstance(sys.stdout, (io.StringIO, io.TextIOWrapper))


def is_in_cell() -> bool:
    """Return whether a cell started this process, as with `!python train.py`.

    Such a cell gives it a terminal, and a saved notebook keeps every drawing of a bar.
    """
    # Kernels set these variables for programs of cells, in every frontend.
    wanted = {"TERM": "xterm-color", "PAGER": "cat", "GIT_PAGER": "cat"}
    return not is_kernel() and wanted.items() <= os.environ.items()


def can_redraw(console: Console) -> bool:
    """Return whether a console can draw over its output, as a bar requires."""
    return console.is_terminal and not is_in_cell()


def make_console() -> Console:
    """Return the console of stdout.

    In a kernel it prints text: by default, rich would make each line a separate output.
    """
    if not is_kernel():
        return Console()
    # Kernels set FORCE_COLOR for programs that cells start.
    return Console(force_jupyter=False, force_terminal=False, width=COLUMNS)


def is_of_notebook(console: Console) -> bool:
    """Return whether the output of a console goes to a cell."""
    is_shown = console.is_jupyter and not console.quiet and console.file is sys.stdout
    return is_shown and has_notebook()


def as_fixed_width(text: str | Text) -> str:
    """Return lines as HTML that keeps spaces and never breaks a line."""
    # JupyterLab shows a plain `pre` in the font of the page, and wraps its lines.
    body = colour_html(text) if isinstance(text, Text) else html.escape(text)
    return f'<pre style="{_FIXED}">{body}</pre>'


_FIXED = "font-family: monospace; white-space: pre; overflow-x: auto; margin: 0; line-height: 1.3"


class LiveOutput:
    """Lines with a bar below them, in one notebook output that is updated.

    It sends messages that all frontends support (`display_data` and `update_display_data`), so it
    needs no widgets, and a saved notebook has the last output. No thread refreshes it. The bar
    moves at most every 0.1 s; lines and the end are always sent.

    Args:
        clock: Returns seconds from any origin. Tests pass their own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._handle: Any = None
        self._lines: list[str] = []
        self._bar: tuple[str, int, int | None, Callable[[], Sequence[str]]] | None = None
        self._drawn = self._added = -float("inf")
        self._is_sent = True

    def draw(
        self,
        title: str,
        done: int,
        total: int | None,
        make_texts: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Draw the bar of a running part, followed by items. No line breaks inside an item.

        Args:
            title: The text before the bar.
            done: How much is done.
            total: The total amount; None if it is unknown.
            make_texts: Called only when the bar is sent.
        """
        if len(self._lines) >= _MOST_LINES:
            self.close()
            self._lines.clear()
            self._handle = None
        self._bar, self._is_sent = (title, done, total, make_texts), False
        if self._clock() - self._drawn >= SECONDS_BETWEEN_UPDATES:
            self._send()

    def add_lines(self, lines: Sequence[str]) -> None:
        """Replace the bar with lines."""
        self._lines += lines
        self._bar, self._is_sent = None, False
        if self._clock() - self._added >= SECONDS_BETWEEN_UPDATES:
            self._send()
            self._added = self._drawn

    def close(self) -> None:
        """Send everything that is pending. A bar that is drawn stays."""
        if not self._is_sent:
            self._send()

    def _send(self) -> None:
        texts, bar = list(self._lines), ""
        if self._bar is not None:
            title, done, total, make_texts = self._bar
            items = [title, f"{done}/{'?' if total is None else total}", *make_texts()]
            texts.append("  ".join(items))
            bar = _format_bar(items, done, total)
        shown = as_fixed_width("\n".join(self._lines)) if self._lines else ""
        data = {"text/plain": "\n".join(texts), "text/html": shown + bar}
        if self._handle is None:
            display: Any = importlib.import_module("IPython.display").display
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._drawn, self._is_sent = self._clock(), True


def _format_bar(items: Sequence[str], done: int, total: int | None) -> str:
    """Return the title, the bar and the other items as HTML."""
    title, *others = (f'<span style="{_OF_ITEM}">{html.escape(x)}</span>' for x in items)
    # Without a value, a browser would move the bar of a saved notebook forever.
    bars = [] if total is None else [f'<progress value="{done}" max="{total}"></progress>']
    # Browsers break lines between these items, never within one.
    return f'<div style="font-family: monospace">{" ".join([title, *bars, *others])}</div>'


# A margin, since converters merge two spaces.
_OF_ITEM = "white-space: nowrap; margin-right: 1ch"
