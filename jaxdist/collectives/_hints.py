"""Hints to collectives, in their two documented spellings."""

import logging
from typing import Any

from jaxdist.errors import ArgumentError

_LOG = logging.getLogger("jaxdist")
_TOLD: set[str] = set()


def hints_of(caller: str, options: Any, experimental_hints: Any) -> Any:
    """The one of `options` and the older `experimental_hints` that was given.

    No hint changes a result. Packing, algorithms and time-outs are not chosen by hints yet;
    that they have no effect is logged once for each caller.
    """
    if options is not None and experimental_hints is not None:
        raise ArgumentError(
            f"{caller} was given both options and experimental_hints.\n\n"
            "They are two names for one thing; give options alone."
        )
    hints = options if options is not None else experimental_hints
    if hints is not None and caller not in _TOLD:
        _TOLD.add(caller)
        _LOG.info("%s: communication options have no effect in this version: %r", caller, hints)
    return hints
