"""The older `MultiWorkerMirroredStrategy`, documented under `tf.distribute.experimental`."""

import warnings
from typing import Any

from jaxdist._called import called
from jaxdist._collectives import CommunicationImplementation, CommunicationOptions
from jaxdist._strategies.multi_worker import MultiWorkerMirroredStrategy
from jaxdist._validate import check_instance
from jaxdist.cluster_resolver import ClusterResolver


class _NameOfNewer(type):
    """Objects of the newer class count as objects of this one."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, MultiWorkerMirroredStrategy)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, MultiWorkerMirroredStrategy)


class ExperimentalMultiWorkerMirroredStrategy(metaclass=_NameOfNewer):
    """Make a `jaxdist.MultiWorkerMirroredStrategy`; this name is deprecated.

    Args:
        communication: A `CommunicationImplementation`, as `implementation` of
            `CommunicationOptions`.
        cluster_resolver: The cluster; None reads `TF_CONFIG`.

    Raises:
        Everything that `jaxdist.MultiWorkerMirroredStrategy` raises.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     strategy = jaxdist.experimental.MultiWorkerMirroredStrategy()
        >>> isinstance(strategy, jaxdist.MultiWorkerMirroredStrategy)
        True

    Source:
        `tf.distribute.experimental.MultiWorkerMirroredStrategy`.
    """

    @called("experimental.MultiWorkerMirroredStrategy")
    def __new__(  # type: ignore[misc]
        cls,
        communication: CommunicationImplementation = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> MultiWorkerMirroredStrategy:
        """Return an object of the newer class."""
        caller = "experimental.MultiWorkerMirroredStrategy"
        check_communication(communication)
        warnings.warn(
            f"jaxdist.{caller} is deprecated; use jaxdist.MultiWorkerMirroredStrategy("
            "communication_options=CommunicationOptions(implementation=...)).",
            DeprecationWarning,
            stacklevel=2,
        )
        options = CommunicationOptions(implementation=communication)
        return MultiWorkerMirroredStrategy(cluster_resolver, options)


def check_communication(communication: Any) -> None:
    """Check the type of `communication`.

    Raises:
        ArgumentTypeError: `communication` is not a `CommunicationImplementation`.
    """
    check_instance(
        "communication",
        communication,
        CommunicationImplementation,
        "a jaxdist.experimental.CommunicationImplementation",
        "Pass CommunicationImplementation.AUTO, or leave it out.",
    )


# The name that users import.
ExperimentalMultiWorkerMirroredStrategy.__name__ = "MultiWorkerMirroredStrategy"
ExperimentalMultiWorkerMirroredStrategy.__qualname__ = "MultiWorkerMirroredStrategy"
