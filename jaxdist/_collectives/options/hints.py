"""The options of a collective, in their two documented spellings."""

import logging
from typing import Any

from jaxdist._called import name_call, refuse, refuse_type
from jaxdist._collectives.marks.trace_notes import note_ignored
from jaxdist._collectives.options.options import CommunicationImplementation, CommunicationOptions
from jaxdist._validate import show

_LOG = logging.getLogger("jaxdist")
_LOGGED: set[tuple[str, str]] = set()
_DEFAULT = CommunicationOptions()


def read_options(
    options: Any,
    experimental_hints: Any,
    *,
    packs: bool = False,
    name: str = "options",
) -> CommunicationOptions:
    """Return the options that were given, and report those without effect.

    `name` is the name of the parameter of `options`.
    """
    given = choose_options(options, experimental_hints, name)
    # A strategy reports a time limit when it knows its devices.
    report_ignored(given, packs=packs, waits=True)
    return given


def choose_options(
    options: Any, experimental_hints: Any, name: str = "options"
) -> CommunicationOptions:
    """Return `options` or the older `experimental_hints`, whichever was given.

    Raises:
        ArgumentError: Both were given.
        ArgumentTypeError: The value is not a `CommunicationOptions`.
    """
    if options is None and experimental_hints is None:
        return _DEFAULT
    if options is not None and experimental_hints is not None:
        raise refuse(
            "both options and experimental_hints.",
            "experimental_hints is an older name for options.",
            "Pass options alone.",
        )
    named = "experimental_hints" if options is None else name
    given = experimental_hints if options is None else options
    if not isinstance(given, CommunicationOptions):
        raise refuse_type(
            f"{named}={show(given)}.",
            f"{named} is a jaxdist.experimental.CommunicationOptions.",
            f"Pass for instance {named}"
            "=jaxdist.experimental.CommunicationOptions(bytes_per_pack=50 * 1024 * 1024), or "
            "leave it out.",
        )
    return given


def report_ignored(options: CommunicationOptions, *, packs: bool, waits: bool = False) -> None:
    """Log options without effect, once for each caller, and note them for `explain`.

    `packs` says that the caller uses `bytes_per_pack`, and `waits` that it uses `timeout_seconds`.
    """
    if options.bytes_per_pack and not packs:
        _report(options, "bytes_per_pack", "the leaves are not reduced by one collective")
    if options.timeout_seconds is not None and not waits:
        _report(options, "timeout_seconds", "all replicas are in this process")
    if options.implementation is not CommunicationImplementation.AUTO:
        _report(options, "implementation", "XLA chooses by platform")


def _report(options: CommunicationOptions, field: str, why: str) -> None:
    """Log one option without effect, and note it for the current trace."""
    # Several calls pass the same option on. The note's key has the option and not the caller, so
    # the first caller, which the user called, is the one in the note.
    caller = name_call()
    note_ignored(f"{field} given to {caller}: {why}", (field, getattr(options, field), why))
    if (caller, field) not in _LOGGED:
        _LOGGED.add((caller, field))
        _LOG.info("%s: %s of the communication options has no effect: %s", caller, field, why)
