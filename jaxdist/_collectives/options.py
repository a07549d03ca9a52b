"""The options of a collective: communication, in its two documented spellings."""

import dataclasses
import enum
import logging
import math
import numbers
import warnings
from typing import Any

from jaxdist._called import called, name_call, refuse
from jaxdist._collectives.marks import note_ignored
from jaxdist._validate import check_instance, show


class CommunicationImplementation(enum.Enum):
    """The communication library. It has no effect here, because XLA chooses by platform.

    Example:
        >>> [m.name for m in jaxdist.experimental.CommunicationImplementation]
        ['AUTO', 'RING', 'NCCL']

    Source:
        `tf.distribute.experimental.CommunicationImplementation`.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of a collective. They change how it communicates, never its result.

    Args:
        bytes_per_pack: Size of a pack in bytes. An all-reduce of many leaves becomes one all-reduce
            for each pack. The last leaf comes first, since backpropagation computes its gradient
            first. A pack is closed when it has exceeded this size. Each pack has one dtype. With
            0, jaxdist packs small leaves where that saves time (`explain` says why), and XLA
            combines the others.
        timeout_seconds: How long a collective between processes may take, in seconds. Within one
            process it has no effect.
        implementation: Has no effect: XLA chooses by platform.

    Raises:
        ArgumentError: `bytes_per_pack` is below 0, `timeout_seconds` is not above 0, either is not
            a number, or the implementation is unknown.

    Example:
        >>> options = jaxdist.experimental.CommunicationOptions(bytes_per_pack=16)
        >>> def step(x):
        ...     grads = [x, 2 * x, 3 * x, 4 * x]
        ...     return get_replica_context().all_reduce("sum", grads, options=options)
        >>> x = PerReplica([np.ones(4, "float32")] * 8)
        >>> compiled = MirroredStrategy().lower(step, (x,)).compile()
        >>> [(c.kind, c.operands) for c in compiled.collectives]
        [('all-reduce', 2), ('all-reduce', 2)]

    Source:
        `tf.distribute.experimental.CommunicationOptions`.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    @called("CommunicationOptions")
    def __post_init__(self) -> None:
        _check_number("bytes_per_pack", self.bytes_per_pack)
        if self.bytes_per_pack < 0:
            raise refuse(
                f"bytes_per_pack={self.bytes_per_pack!r}.",
                "bytes_per_pack is a number of bytes, from 0 up.",
                "Pass 0 for an automatic choice, or for instance 50 * 1024 * 1024.",
            )
        if self.timeout_seconds is not None:
            _check_number("timeout_seconds", self.timeout_seconds)
            if not self.timeout_seconds > 0:
                raise refuse(
                    f"timeout_seconds={self.timeout_seconds!r}.",
                    "timeout_seconds is a time in seconds, above 0.",
                    "Leave it out to wait without a limit, or pass for instance 120.0.",
                )
        # The dataclass is frozen, so that options can be keys of caches.
        object.__setattr__(self, "implementation", _parse_implementation(self.implementation))

    @called("CommunicationOptions.merged")
    def merged(self, later: "CommunicationOptions") -> "CommunicationOptions":
        """Return these options, with the fields of `later` that differ from the defaults.

        Example:
            >>> Options = jaxdist.experimental.CommunicationOptions
            >>> Options(5, 1.0).merged(Options(bytes_per_pack=7))  # doctest: +ELLIPSIS
            CommunicationOptions(bytes_per_pack=7, timeout_seconds=1.0, ...)
        """
        remedy = "Pass for instance CommunicationOptions(bytes_per_pack=1 << 20)."
        check_instance("later", later, CommunicationOptions, "a CommunicationOptions", remedy)
        defaults = CommunicationOptions()
        # A subclass may have fields of its own.
        names = [field.name for field in dataclasses.fields(self)]
        values = {name: getattr(later, name) for name in names}
        given = {n: value for n, value in values.items() if value != getattr(defaults, n)}
        return dataclasses.replace(self, **given)


@called("CollectiveHints", replaces="CommunicationOptions")
def CollectiveHints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Return `CommunicationOptions`; this is their older name.

    Args:
        bytes_per_pack: See `CommunicationOptions`.
        timeout_seconds: See `CommunicationOptions`.

    Returns:
        `CommunicationOptions`.

    Raises:
        ArgumentError: See `CommunicationOptions`.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     hints = jaxdist.experimental.CollectiveHints(bytes_per_pack=50 * 1024 * 1024)
        >>> hints.bytes_per_pack
        52428800

    Source:
        `tf.distribute.experimental.CollectiveHints`.
    """
    warnings.warn(
        "jaxdist.experimental.CollectiveHints is the older name of "
        "jaxdist.experimental.CommunicationOptions.",
        DeprecationWarning,
        stacklevel=2,
    )
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


def _check_number(name: str, value: Any) -> None:
    """Refuse a field that is not a number, or not an integer where it must be one."""
    is_whole = name == "bytes_per_pack"
    kind = numbers.Integral if is_whole else numbers.Real
    # To Python, `True` is an integer. As a number of bytes it is a mistake.
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or math.isnan(value):
        raise refuse(
            f"{name}={show(value)}.",
            f"{name} is {'an integer' if is_whole else 'a number'}.",
            f"Pass for instance {'50 * 1024 * 1024' if is_whole else '120.0'}, or leave it out.",
        )


def _parse_implementation(given: Any) -> CommunicationImplementation:
    """Return the member that `given` names, or raise an error that lists all names."""
    if isinstance(given, CommunicationImplementation):
        return given
    names = [m.name for m in CommunicationImplementation]
    if isinstance(given, str) and given.upper() in names:
        return CommunicationImplementation[given.upper()]
    raise refuse(
        f"implementation={show(given)}.",
        f"implementation is one of {', '.join(names)}.",
        "Leave it out: XLA chooses by platform.",
    )


_LOG = logging.getLogger("jaxdist")
_LOGGED: set[tuple[str, str]] = set()
_DEFAULT = CommunicationOptions()


def read_options(
    options: Any, experimental_hints: Any, name: str = "options"
) -> CommunicationOptions:
    """Return the options that were given, and report those without effect.

    `name` is the name of the parameter of `options`.
    """
    given = choose_options(options, experimental_hints, name)
    # Whether a limit has an effect is reported by a strategy, which knows its devices.
    report_ignored(given, packs=True, waits=True)
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
    given: Any = experimental_hints if options is None else options
    check_instance(
        named,
        given,
        CommunicationOptions,
        "a jaxdist.experimental.CommunicationOptions",
        f"Pass for instance {named}"
        "=jaxdist.experimental.CommunicationOptions(bytes_per_pack=50 * 1024 * 1024), or "
        "leave it out.",
    )
    return given


def report_ignored(options: CommunicationOptions, *, packs: bool, waits: bool) -> None:
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
