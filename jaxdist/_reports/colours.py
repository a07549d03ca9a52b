"""Chooses colours of replicas for terminals, notebooks and pictures."""

import collections
import html
from collections.abc import Iterable, Sequence

from rich.text import Text

# Not names, since a terminal may show "white" as grey.
_BLACK, _WHITE = "#000000", "#ffffff"
# Backgrounds that people with any colour vision can distinguish (Okabe and Ito, 2008, and a grey),
# and the colour of the text on each. Text on its own background is readable on every screen.
PALETTE = (
    ("#56b4e9", _BLACK),
    ("#e69f00", _BLACK),
    ("#009e73", _BLACK),
    ("#f0e442", _BLACK),
    ("#0072b2", _WHITE),
    ("#d55e00", _BLACK),
    ("#cc79a7", _BLACK),
    ("#b0b0b0", _BLACK),
)


def choose_colours(count: int, touching: Iterable[tuple[int, int]] = ()) -> tuple[int, ...]:
    """Return the index in the palette of each replica; replicas that touch get different ones.

    Up to 8 replicas have a colour each. With more, colours repeat, and the numbers of the replicas
    distinguish them.

    Args:
        count: The number of replicas.
        touching: Pairs of replicas that are neighbours.

    Example:
        >>> choose_colours(10), choose_colours(9, [(8, 0)])
        ((0, 1, 2, 3, 4, 5, 6, 7, 0, 1), (0, 1, 2, 3, 4, 5, 6, 7, 1))
    """
    near: dict[int, set[int]] = collections.defaultdict(set)
    for one, other in touching:
        near[max(one, other)].add(min(one, other))
    chosen: list[int] = []
    for replica in range(count):
        used = {chosen[n] for n in near[replica] if n < replica}
        order = ((replica + k) % len(PALETTE) for k in range(len(PALETTE)))
        chosen.append(next((c for c in order if c not in used), replica % len(PALETTE)))
    return tuple(chosen)


def style_of(colour: int) -> str:
    """Return the rich style for an index in the palette."""
    back, front = PALETTE[colour]
    return f"{front} on {back}"


def colour_html(text: Text) -> str:
    """Return text as HTML, with its coloured pieces."""
    done = 0
    parts: list[str] = []
    for span in sorted(text.spans, key=lambda span: span.start):
        front, _, back = str(span.style).partition(" on ")
        piece = html.escape(text.plain[span.start : span.end])
        parts += [
            html.escape(text.plain[done : span.start]),
            f'<span style="color:{front};background:{back}">{piece}</span>',
        ]
        done = span.end
    return "".join([*parts, html.escape(text.plain[done:])])


def list_replicas(colours: Sequence[int]) -> Text:
    """Return the legend: replica numbers in their colours; if there are many, the first ones."""
    legend = Text("Replicas:")
    for replica, colour in enumerate(colours[: len(PALETTE)]):
        legend.append(" ")
        legend.append(str(replica), style_of(colour))
    if len(colours) > len(PALETTE):
        legend.append(" ... ")
        legend.append(str(len(colours) - 1), style_of(colours[-1]))
    return legend
