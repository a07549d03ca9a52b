"""`TerminationConfig`: how a job gets notice that it will be ended, and how it reacts."""

import dataclasses
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._devices import chips
from jaxdist._metadata_server import read_metadata
from jaxdist._validate import as_number, check_callable

# Maps a path such as `instance/maintenance-event` to the response of the metadata server.
ReadMetadata = Callable[[str], str]

_LOG = logging.getLogger("jaxdist")
_PRODUCT = "/sys/class/dmi/id/product_name"
_EVENT = "TERMINATE_ON_HOST_MAINTENANCE"


def find_metadata_server(product: str = _PRODUCT) -> ReadMetadata | None:
    """Return a function that reads the metadata server; None outside of Compute Engine.

    The firmware identifies the platform, so nothing is sent over the network on other machines.

    Args:
        product: The file with the name of the machine's product.
    """
    try:
        with open(product) as file:
            name = file.read()
    except OSError:
        return None
    return read_metadata if "Google Compute Engine" in name else None


def has_maintenance_event(read: ReadMetadata) -> bool:
    """Whether the machine will be ended for maintenance.

    If the server does not answer, the result is False; the next query is a second later.
    """
    try:
        return read("instance/maintenance-event").strip() == _EVENT
    except OSError as error:
        _LOG.warning("The metadata server of this machine did not answer: %s", error)
        return False


_CALLER = "TerminationConfig"
# Exit codes and seconds as in TensorFlow.
_CODE, _CODE_ON_GCE = 42, 143
_GRACE_OF_GPUS_ON_GCE = 3600.0


class TerminationConfig:
    """How `PreemptionCheckpointHandler` gets notice that the job will be ended, and how it reacts.

    By default, SIGTERM is the notice, and the job saves immediately and ends with exit code 42. On
    machines of Google Compute Engine, the notice is a maintenance event of the machine, the exit
    code is 143, and a job with GPUs continues for most of the 3600 s that such a machine has.

    Args:
        termination_watcher_fn: A function that a thread calls once a second, until it returns True,
            which means that the job will be ended. It must not block. None means SIGTERM. With a
            function, SIGTERM ends the process as usual.
        exit_fn: Called in every process after the last save, for instance `lambda: sys.exit(42)`.
            If it returns, training continues, and the handler does nothing more.
        grace_period: Seconds between the notice and the end. If above 0, the job saves immediately,
            continues, and saves a second time shortly before the end.
        save_fn: A function that saves instead of `Checkpoints.save`. It gets the arguments of
            `save_checkpoint_if_preempted`; `run` calls it without arguments. It must return only
            when the files are complete.

    Raises:
        ArgumentTypeError: A function is not callable, or the period is not a number.
        ArgumentError: The period is below 0 or infinite.

    Example:
        >>> config = jaxdist.experimental.TerminationConfig(grace_period=120)
        >>> config.grace_period
        120.0

    Source:
        `tf.distribute.experimental.TerminationConfig`.
    """

    @called(_CALLER)
    def __init__(
        self,
        termination_watcher_fn: Callable[[], bool] | None = None,
        exit_fn: Callable[[], Any] | None = None,
        grace_period: float | None = None,
        save_fn: Callable[..., Any] | None = None,
    ) -> None:
        functions = {
            "termination_watcher_fn": termination_watcher_fn,
            "exit_fn": exit_fn,
            "save_fn": save_fn,
        }
        for name, function in functions.items():
            if function is not None:
                check_callable(function, name, f"Pass a function, or leave {name} out.")
        if grace_period is not None:
            grace_period = as_number("grace_period", grace_period)
            if not 0 <= grace_period < math.inf:
                raise refuse(
                    f"grace_period={grace_period!r}.",
                    "It is a number of seconds, from 0 up.",
                    "Pass for instance grace_period=120, or leave it out.",
                )
        self.termination_watcher_fn = termination_watcher_fn
        self.exit_fn = exit_fn
        self.grace_period = grace_period
        self.save_fn = save_fn


@dataclasses.dataclass(frozen=True)
class CompleteConfig:
    """A configuration with the defaults of this machine; `watch=None` means SIGTERM."""

    watch: Callable[[], bool] | None
    exit: Callable[[], Any]
    grace: float
    save: Callable[..., Any] | None


def complete_config(
    config: TerminationConfig | None, read_metadata: ReadMetadata | None
) -> CompleteConfig:
    """Add the defaults of this machine.

    Args:
        config: The configuration that the user passed.
        read_metadata: Reads the metadata server of Google Compute Engine; None elsewhere.
    """
    given = config or TerminationConfig()
    watch, code, grace = given.termination_watcher_fn, _CODE, 0.0
    if read_metadata is not None:
        read = read_metadata
        watch = watch or (lambda: has_maintenance_event(read))
        code = _CODE_ON_GCE
        if "GPU" in chips.accelerators(None):
            grace = _GRACE_OF_GPUS_ON_GCE
    grace = grace if given.grace_period is None else given.grace_period
    return CompleteConfig(watch, given.exit_fn or (lambda: sys.exit(code)), grace, given.save_fn)
