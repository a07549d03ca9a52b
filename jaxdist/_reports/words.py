"""Formats numbers with units, and lines of source, as text."""

import os

from jaxdist._reports.notebook import name_cells

_SIZES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_COUNTS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def size(num_bytes: float) -> str:
    """Return a number of bytes as text, such as `1.5 GiB`.

    Example:
        >>> size(1536), size(12)
        ('1.5 KiB', '12 B')
    """
    for unit, one in _SIZES:
        if num_bytes >= one:
            return f"{_format_short(num_bytes / one)} {unit}"
    return f"{num_bytes:,.0f} B"


def seconds(value: float) -> str:
    """Return a time as text, such as `2.5 ms`.

    Example:
        >>> seconds(0.0025), seconds(0.0)
        ('2.5 ms', '0 us')
    """
    unit, one = next((row for row in _TIMES if value >= row[1]), _TIMES[-1])
    return f"{_format_short(value / one)} {unit}"


def count(value: float, what: str) -> str:
    """Return a large number as text, such as `3.2 TFLOP`.

    Example:
        >>> count(3.2e12, "FLOP"), count(12, "FLOP")
        ('3.2 TFLOP', '12 FLOP')
    """
    unit, one = next((row for row in _COUNTS if value >= row[1]), ("", 1.0))
    return f"{_format_short(value / one)} {unit}{what}"


def share(part: float) -> str:
    """Return a fraction as text, such as `42%`.

    Example:
        >>> share(0.421), share(0.0021), share(0.00002), share(0)
        ('42%', '0.21%', '<0.01%', '0%')
    """
    if 0 < part < 1e-4:
        return "<0.01%"
    return f"{part:.0%}" if part >= 0.1 or not part else f"{100 * part:.2g}%"


def plural(number: int, what: str) -> str:
    """Return a number with its noun, such as `1 replica` or `2 replicas`.

    Example:
        >>> plural(1, "chip"), plural(6144, "chip")
        ('1 chip', '6,144 chips')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def shorten_source(source: str) -> str:
    """Return `file:line`, of a cell, or relative to the working directory if it is inside it."""
    # Look it up at every call, since the working directory may change.
    return name_cells(source).removeprefix(os.getcwd() + os.sep)


def _format_short(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
