"""Tables as aligned text, as HTML and for rich."""

import dataclasses
import html
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells below a title; `numbers` are the columns that are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()

    def lines(self) -> Iterator[str]:
        """Aligned text."""
        yield self.title
        cells = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        for row in cells:
            yield "  " + "  ".join(self._aligned(row, widths)).rstrip()

    def _aligned(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        for cell, width, column in zip(row, widths, self.columns, strict=True):
            yield cell.rjust(width) if column in self.numbers else cell.ljust(width)

    def html(self) -> str:
        """A table of HTML."""
        head = "".join(f"<th>{html.escape(c)}</th>" for c in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>"
            for row in self.rows
        )
        return (
            f"<table><caption>{html.escape(self.title)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def rich(self) -> RichTable:
        """A table of rich."""
        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        for column in self.columns:
            justify = "right" if column in self.numbers else "left"
            table.add_column(column, justify=justify, overflow="fold")
        for row in self.rows:
            # As Text: rich would take what is in brackets for markup.
            table.add_row(*map(Text, row))
        return table


def as_text(parts: Sequence[Table | str]) -> str:
    """Tables and sentences, one after the other."""
    lines: list[str] = []
    for part in parts:
        lines += part.lines() if isinstance(part, Table) else [part]
    return "\n".join(lines)


def as_html(parts: Sequence[Table | str]) -> str:
    """The same for a notebook."""
    return "".join(p.html() if isinstance(p, Table) else _block(p) for p in parts)


def _block(text: str) -> str:
    """A sentence, or lines that are aligned."""
    tag = "pre" if "\n" in text else "p"
    return f"<{tag}>{html.escape(text)}</{tag}>"


def as_rich(parts: Sequence[Table | str]) -> RenderableType:
    """The same for rich."""
    return Group(*(p.rich() if isinstance(p, Table) else Text(p) for p in parts))
