"""Formats tables as aligned text, as HTML and for rich."""

import abc
import dataclasses
import html
import itertools
import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from jaxdist._reports.colours import colour_html, style_of
from jaxdist._reports.notebook import COLUMNS, as_fixed_width, has_notebook, is_kernel

# Text that stays on one line: a number and its unit, two numbers with "x" between them, a shape.
_UNIT = r"(?:[KMGT]i?B|B|bytes?|[mu]?s|[kMGTP]?FLOP(?:/s)?|[kMGTP]?B/s)"
_TOGETHER = re.compile(
    rf"\d {_UNIT}(?![\w/])|[\d,.]+(?: x [\d,.]+)+|[\[(][\d:][\d:, ]{{0,30}}[\])]"
)
# In a narrower column, words are harder to read than a block of lines.
_NARROWEST = 16
_NO_BREAK = "\N{NO-BREAK SPACE}"


class Block(abc.ABC):
    """Base class of report parts whose lines depend on the width of the screen."""

    @abc.abstractmethod
    def texts(self, width: int | None = None) -> Iterator[Text]:
        """Yield lines, with their colours if the output has colours.

        Args:
            width: The columns of the screen; None for as many as needed.
        """

    @abc.abstractmethod
    def html(self) -> str:
        """Return the block as HTML."""

    def lines(self, width: int | None = None) -> Iterator[str]:
        """Yield lines without colours."""
        return (text.plain for text in self.texts(width))


@dataclasses.dataclass(frozen=True)
class Table(Block):
    """Rows of cells below a title.

    Attributes:
        title: The title.
        columns: The names of the columns.
        rows: The cells.
        numbers: Columns that are aligned to the right, and do not wrap.
        whole: Other columns that do not wrap, such as shapes.
        coloured: A column with numbers of replicas.
        colours: For each row, the index of its replica's colour in the palette; -1 for none.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    coloured: str = ""
    colours: tuple[int, ...] = ()

    def texts(self, width: int | None = None) -> Iterator[Text]:
        """Yield lines of aligned text.

        Args:
            width: The columns of the screen; None for as many as the table needs. Words wrap
                between words, and numbers never do. If that is not enough, each row becomes a
                block of lines.
        """
        title = [self.title] if width is None else _wrap_indented(self.title, width)
        yield from map(Text, title)
        widths = self._find_widths(width)
        if widths is None:
            yield from self._blocks(width or 0)
            return
        for number, row in enumerate((self.columns, *self.rows)):
            cells = [
                [cell] if number and column in self._unbroken else _wrap(cell, own)
                for cell, own, column in zip(row, widths, self.columns, strict=True)
            ]
            for n, line in enumerate(itertools.zip_longest(*cells, fillvalue="")):
                aligned = list(self._align(line, widths))
                text = Text("  " + "  ".join(aligned).rstrip())
                if number and not n and self._find_colour(number - 1) >= 0:
                    place = self.columns.index(self.coloured)
                    start = 2 + sum(len(cell) + 2 for cell in aligned[:place])
                    self._colour(text, number - 1, start)
                yield text

    def _find_colour(self, row: int) -> int:
        return self.colours[row] if self.colours else -1

    def _colour(self, text: Text, row: int, start: int) -> None:
        """Colour the number of the replica, which comes after `start`."""
        name = self.rows[row][self.columns.index(self.coloured)]
        first = text.plain.find(name, start)
        text.stylize(style_of(self.colours[row]), first, first + len(name))

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
                    len(r[i])
                    if column in self._unbroken
                    else max(_longest_word(r[i]), min(len(r[i]), _NARROWEST))
                    for r in self.rows
                ),
            )
            for i, column in enumerate(self.columns)
        ]
        spare = width - between - sum(widths)
        if spare < 0:
            return None
        # The narrowest columns come first: a wide one wraps anyway.
        order = sorted(range(len(widths)), key=lambda i: most[i])
        for left, i in zip(range(len(order), 0, -1), order, strict=True):
            more = min(most[i] - widths[i], spare if left == 1 else max(spare // left, 0))
            widths[i] += more
            spare -= more
        return widths

    def _blocks(self, width: int) -> Iterator[Text]:
        """Yield the first cell of each row, and below it the others with their columns.

        A line has as many cells as fit. A cell that does not fit into a line has its own lines.
        """
        for number, (first, *others) in enumerate(self.rows):
            lines = [f"  {line}" for line in _wrap(first, width - 2)]
            # The line with the number of the replica, and the end of the name before it.
            place = (0, 2) if self.columns[0] == self.coloured else None
            can_join = False
            for column, cell in zip(self.columns[1:], others, strict=True):
                if not cell:
                    continue
                item, *more = _wrap(f"{column}: {cell}", width - 6)
                if can_join and not more and len(lines[-1]) + 2 + len(item) <= width:
                    lines[-1] += f"  {item}"
                else:
                    lines.append(f"    {item}")
                if column == self.coloured:
                    place = (len(lines) - 1, len(lines[-1]) - len(item) + len(column))
                lines += [f"      {line}" for line in more]
                can_join = not more
            for n, line in enumerate(lines):
                text = Text(line)
                if place is not None and place[0] == n and self._find_colour(number) >= 0:
                    self._colour(text, number, place[1])
                yield text

    def _align(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        """Yield the cells of a row, padded to the widths."""
        for cell, width, column in zip(row, widths, self.columns, strict=True):
            yield cell.rjust(width) if column in self.numbers else cell.ljust(width)

    def html(self) -> str:
        """Return the table as HTML. Numbers and shapes do not wrap; a wide table scrolls."""
        head = self._format_row("th", self.columns)
        rows = enumerate(self.rows)
        body = "".join(self._format_row("td", row, self._find_colour(n)) for n, row in rows)
        title = f'<caption style="{_OF_TITLE}">{html.escape(self.title)}</caption>'
        table = f"<table>{title}<thead>{head}</thead><tbody>{body}</tbody></table>"
        return f'<div style="overflow-x: auto">{table}</div>'

    def _format_row(self, tag: str, cells: Sequence[str], colour: int = -1) -> str:
        """Return a row as HTML, with the replica in its colour."""
        row = ""
        for cell, column in zip(cells, self.columns, strict=True):
            # Frontends have different defaults for alignment.
            style = f"text-align: {'right' if column in self.numbers else 'left'}"
            if column in self._unbroken:
                style += "; white-space: nowrap"
            text = Text(cell)
            if column == self.coloured and colour >= 0:
                text.stylize(style_of(colour))
            row += f'<{tag} style="{style}">{colour_html(text)}</{tag}>'
        return f"<tr>{row}</tr>"


_OF_TITLE = "text-align: left; font-weight: bold; white-space: nowrap"


def _wrap(text: str, width: int) -> list[str]:
    """Break a string between words into lines; a longer word gets its own line."""
    text = _keep_numbers(text)
    lines = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines] or [""]


def _keep_numbers(text: str) -> str:
    """Return the text with non-breaking spaces in numbers with units, and in shapes."""
    return _TOGETHER.sub(lambda found: found[0].replace(" ", _NO_BREAK), text)


def join_items(items: Iterable[str], width: int | None, between: str, *, indent: int) -> list[str]:
    """Join items into lines of a width, without breaking an item; indent later lines.

    Without a width, the result is one line.
    """
    lines: list[str] = []
    for item in items:
        if lines and (width is None or len(lines[-1]) + len(between) + len(item) <= width):
            lines[-1] += between + item
        else:
            lines.append(" " * indent * bool(lines) + item)
    return lines


def _wrap_indented(line: str, width: int) -> list[str]:
    """Break a line, and indent later lines like its beginning. A line that fits does not change."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return [indent + own for own in _wrap(line.strip(), width - len(indent))]


def _longest_word(text: str) -> int:
    # Not `split()`, which also splits at non-breaking spaces.
    return max(map(len, _keep_numbers(text).split(" ")))


def as_text(parts: Iterable[Block | str], width: int | None = None) -> str:
    """Return tables and sentences as text, for a screen with this many columns."""
    return "\n".join(text.plain for text in _list_texts(parts, width))


def _list_texts(parts: Iterable[Block | str], width: int | None) -> Iterator[Text]:
    for part in parts:
        if isinstance(part, Block):
            yield from part.texts(width)
        elif width is None:
            yield Text(part)
        else:
            for line in part.split("\n"):
                yield from map(Text, _wrap_indented(line, width))


def as_html(parts: Iterable[Block | str]) -> str:
    """Return tables and sentences as HTML, for a notebook."""
    return "".join(p.html() if isinstance(p, Block) else _format_block(p) for p in parts)


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

    The environment variable `COLUMNS` overrides it. A notebook cell has 100 columns.
    """
    if is_kernel() and "COLUMNS" not in os.environ:
        # The terminal of a kernel belongs to the server that started it.
        return COLUMNS if has_notebook() else None
    return shutil.get_terminal_size((0, 0)).columns or None


@dataclasses.dataclass(frozen=True)
class _OfConsole:
    """Tables and sentences for rich, as wide as its console."""

    parts: tuple[Block | str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        # As Text, because rich reads brackets in a string as markup, and shapes have brackets.
        for line in _list_texts(self.parts, options.max_width):
            # Rich cuts off text that is wider than the console. A longer name continues on the
            # next line, as on a terminal.
            for start in range(0, max(len(line), 1), options.max_width):
                piece = line[start : start + options.max_width]
                piece.overflow, piece.no_wrap = "ignore", True
                yield piece


class Report(abc.ABC):
    """Base class of reports: tables and sentences for terminals, notebooks and rich."""

    @abc.abstractmethod
    def parts(self) -> Iterable[Block | str]:
        """Return tables and sentences."""

    def text(self) -> str:
        """Return the whole report as aligned text.

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
