"""The communication options of a collective."""

import dataclasses
import enum
import math
import numbers
import warnings
from typing import Any

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import show


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
        if not isinstance(later, CommunicationOptions):
            raise refuse_type(
                f"later={show(later)}.",
                "later is a CommunicationOptions.",
                "Pass for instance CommunicationOptions(bytes_per_pack=1 << 20).",
            )
        defaults = CommunicationOptions()
        given = {
            field.name: getattr(later, field.name)
            for field in dataclasses.fields(self)
            if getattr(later, field.name) != getattr(defaults, field.name)
        }
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
