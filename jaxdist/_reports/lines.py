"""Prints lines of a training."""

from collections.abc import Iterable

from rich.console import Console

from jaxdist._reports.notebook import can_redraw
from jaxdist._reports.tables import as_text, join_items


def print_line(console: Console, text: str) -> None:
    """Print a string, above a live bar of the same console.

    A terminal breaks wide lines anywhere, so there they break between words. Elsewhere the string
    does not change.
    """
    if can_redraw(console):
        text = as_text([text], console.width)
    own, console.is_jupyter = console.is_jupyter, False
    try:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    finally:
        console.is_jupyter = own


def print_items(console: Console, items: Iterable[str]) -> None:
    """Print items without breaking one: on as many lines as a terminal needs, elsewhere on one."""
    width = console.width if can_redraw(console) else None
    print_line(console, "\n".join(join_items(items, width, "  ", indent=4)))
