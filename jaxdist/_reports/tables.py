"""Tables as aligned text, as HTML and for rich."""

import abc
import dataclasses
import html
import itertools
import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from jaxdist._reports.notebook import COLUMNS, as_fixed_width, has_notebook, is_kernel


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells below a title.

    Attributes:
        title: The title.
        columns: The names of the columns.
        rows: The cells.
        numbers: Columns that are aligned to the right, and do not wrap.
        whole: Other columns that do not wrap, such as shapes.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()

    def lines(self, width: int | None = None) -> Iterator[str]:
        """Yield lines of aligned text.

        Args:
            width: The columns of the screen; None for as many as the table needs. Texts wrap
                between words, and numbers never. Where that is not enough, each row becomes a block
                of lines.
        """
        yield self.title
        widths = self._find_widths(width)
        if widths is None:
            yield from self._blocks(width or 0)
            return
        for number, row in enumerate((self.columns, *self.rows)):
            cells = [
                [cell] if number and column in self._unbroken else _wrap(cell, own)
                for cell, own, column in zip(row, widths, self.columns, strict=True)
            ]
            for line in itertools.zip_longest(*cells, fillvalue=""):
                yield "  " + "  ".join(self._align(line, widths)).rstrip()

    @property
    def _unbroken(self) -> frozenset[str]:
        return self.numbers | self.whole

    def _find_widths(self, width: int | None) -> list[int] | None:
        """Return the width of each column, or None if the words of a row do not fit."""
        cells = [self.columns, *self.rows]
        most = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        between = 2 * len(self.columns)
        if width is None or between + sum(most) <= width:
            return most
        widths = [
            max(
                _longest_word(column),
                *(
                    len(r[i]) if column in self._unbroken else _longest_word(r[i])
                    for r in self.rows
                ),
            )
            for i, column in enumerate(self.columns)
        ]
        spare = width - between - sum(widths)
        if spare < 0:
            return None
        # The narrowest columns first: a wide one wraps anyway.
        order = sorted(range(len(widths)), key=lambda i: most[i])
        for left, i in zip(range(len(order), 0, -1), order, strict=True):
            more = min(most[i] - widths[i], spare if left == 1 else max(spare // left, 0))
            widths[i] += more
            spare -= more
        return widths

    def _blocks(self, width: int) -> Iterator[str]:
        """Yield each row as its first cell, and below it the others with their columns."""
        for first, *others in self.rows:
            yield f"  {first}"
            for column, cell in zip(self.columns[1:], others, strict=True):
                lines = _wrap(f"{column}: {cell}", width - 4)
                yield from (f"    {'  ' * (n > 0)}{line}" for n, line in enumerate(lines))

    def _align(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        """Yield the cells of a row, padded to the widths."""
        for cell, width, column in zip(row, widths, self.columns, strict=True):
            yield cell.rjust(width) if column in self.numbers else cell.ljust(width)

    def html(self) -> str:
        """Return the table as HTML. Numbers and shapes do not wrap; a wide table scrolls."""
        head = self._format_row("th", self.columns)
        body = "".join(self._format_row("td", row) for row in self.rows)
        title = f'<caption style="{_OF_TITLE}">{html.escape(self.title)}</caption>'
        table = f"<table>{title}<thead>{head}</thead><tbody>{body}</tbody></table>"
        return f'<div style="overflow-x: auto">{table}</div>'

    def _format_row(self, tag: str, cells: Sequence[str]) -> str:
        """Return a row as HTML."""
        row = ""
        for cell, column in zip(cells, self.columns, strict=True):
            # Frontends differ in what they align.
            style = f"text-align: {'right' if column in self.numbers else 'left'}"
            if column in self._unbroken:
                style += "; white-space: nowrap"
            row += f'<{tag} style="{style}">{html.escape(cell)}</{tag}>'
        return f"<tr>{row}</tr>"


_OF_TITLE = "text-align: left; font-weight: bold; white-space: nowrap"


def _wrap(text: str, width: int) -> list[str]:
    """Break a text between words into lines; a word that is longer has a line of its own."""
    lines = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def join_items(items: Iterable[str], width: int, between: str, *, indent: int) -> list[str]:
    """Join items into lines of a width, none of which breaks an item; later lines are indented."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(between) + len(item) <= width:
            lines[-1] += between + item
        else:
            lines.append(" " * indent * bool(lines) + item)
    return lines


def _wrap_indented(line: str, width: int) -> list[str]:
    """Break a line, and indent what follows as its beginning. A line that fits stays as it is."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return [indent + own for own in _wrap(line.strip(), width - len(indent))]


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def as_text(parts: Iterable[Table | str], width: int | None = None) -> str:
    """Return tables and sentences as text, for a screen with so many columns."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Table):
            lines += part.lines(width)
        elif width is None:
            lines.append(part)
        else:
            for line in part.split("\n"):
                lines += _wrap_indented(line, width)
    return "\n".join(lines)


def as_html(parts: Iterable[Table | str]) -> str:
    """Return tables and sentences as HTML, for a notebook."""
    return "".join(p.html() if isinstance(p, Table) else _format_block(p) for p in parts)


def _format_block(text: str) -> str:
    """Return text as HTML: a sentence, which wraps, or aligned lines."""
    if "\n" in text:
        return as_fixed_width(text)
    if not text:
        return ""
    sentence = text.lstrip(" ")
    indent = (len(text) - len(sentence)) / 2
    return f'<p style="margin: 0.3em 0 0.3em {indent:g}em">{html.escape(sentence)}</p>'


def find_screen_width() -> int | None:
    """Return the columns of the terminal that the output goes to; None if it goes elsewhere.

    The environment variable `COLUMNS` says otherwise. A cell of a notebook has 100.
    """
    if is_kernel() and "COLUMNS" not in os.environ:
        # The terminal of a kernel is that of the server that started it.
        return COLUMNS if has_notebook() else None
    return shutil.get_terminal_size((0, 0)).columns or None


@dataclasses.dataclass(frozen=True)
class _OfConsole:
    """Tables and sentences for rich, as wide as its console."""

    parts: tuple[Table | str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        # As Text, because rich reads brackets in a string as markup, and shapes have brackets.
        for line in as_text(self.parts, options.max_width).split("\n"):
            yield Text(line, overflow="ignore", no_wrap=True)


class Report(abc.ABC):
    """Base class of what is shown as tables and sentences: in a terminal, a notebook, by rich."""

    @abc.abstractmethod
    def parts(self) -> Iterable[Table | str]:
        """Return tables and sentences."""

    def text(self) -> str:
        """Return all of it as aligned text.

        Example:
            >>> program = OneDeviceStrategy("cpu:0").lower(lambda x: x + 1, (jnp.ones(4),))
            >>> print(program.compile_for("v5e:2x2").text().splitlines()[0])
            Plan of <lambda> for v5e:2x2: 4 chips, 4 replicas x 1 logical device
        """
        return as_text(self.parts())

    def __str__(self) -> str:
        return as_text(self.parts(), find_screen_width())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self.parts())

    def __rich__(self) -> RenderableType:
        return _OfConsole(tuple(self.parts()))
