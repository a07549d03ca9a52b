"""`initialize_tpu_system` and `shutdown_tpu_system`, and the cache of TPU systems."""

import logging
from typing import Any

from jaxdist import _compat, _devices
from jaxdist._called import call_as, called, name_call, refuse_type
from jaxdist._validate import check_instance, check_text, show
from jaxdist.errors import ContextError
from jaxdist.tpu import _system
from jaxdist.tpu._system import TPUSystem
from jaxdist.tpu._topology import Topology

_LOG = logging.getLogger("jaxdist")
_LOCAL = "local"
_INITIALIZED: set[str] = set()
# Each time libtpu describes a slice, it makes new device objects, which do not equal the old ones.
# One description per name keeps them comparable.
_FOUND: dict[str, TPUSystem] = {}


@called("initialize_tpu_system")
def initialize_tpu_system(cluster_resolver: Any = None) -> Topology:
    """Find the TPUs of `cluster_resolver` and return their topology.

    This starts the chips, since JAX starts them at its first access. Arrays on the chips stay
    valid, whereas TensorFlow's function erases the memory of the chips.

    Args:
        cluster_resolver: A `cluster_resolver.TPUClusterResolver`; None for the TPUs of this
            machine.

    Returns:
        The topology.

    Raises:
        NotFoundError: No TPU was found; the message says where jaxdist searched.
        ArgumentTypeError: `cluster_resolver` is not a resolver of TPUs.
        ContextError: Called inside a step or a traced function.

    Example:
        >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x4")
        >>> jaxdist.tpu.experimental.initialize_tpu_system(resolver)
        Topology(2x4x1 chips, 1 core each, 2 tasks)

    Source:
        `tf.tpu.experimental.initialize_tpu_system`.
    """
    name = _read_name(cluster_resolver)
    if name in _INITIALIZED:
        _LOG.info("The TPU system %r was initialized before; arrays on it stay valid.", name)
    # A second call looks for real and virtual devices again. A description stays; see `_FOUND`.
    if not name.startswith(_system.DESCRIBED):
        _FOUND.pop(name, None)
    system = system_of(name, "initialize_tpu_system(cluster_resolver=...)")
    _INITIALIZED.add(name)
    if cluster_resolver is not None:
        cluster_resolver.set_tpu_topology(system.topology.serialized())
    return system.topology


@called("shutdown_tpu_system")
def shutdown_tpu_system(cluster_resolver: Any = None) -> None:
    """End the use of the TPUs of `cluster_resolver`, and clear JAX's caches of programs.

    JAX does not release the chips before the process ends.

    Args:
        cluster_resolver: A `cluster_resolver.TPUClusterResolver`; None for the TPUs of this
            machine.

    Raises:
        NotFoundError: No TPU was found.
        ArgumentTypeError: `cluster_resolver` is not a resolver of TPUs.
        ContextError: Called inside a step or a traced function.

    Example:
        >>> resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x2")
        >>> topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
        >>> jaxdist.tpu.experimental.shutdown_tpu_system(resolver)

    Source:
        `tf.tpu.experimental.shutdown_tpu_system`.
    """
    name = _read_name(cluster_resolver)
    system_of(name, "shutdown_tpu_system(cluster_resolver=...)")
    _FOUND.pop(name, None)
    _INITIALIZED.discard(name)
    _devices.chips.clear_caches()


@called("tpu.system_of")
def system_of(name: str, caller: str | None = None) -> TPUSystem:
    """Return the TPU system with a name; the first call looks for it.

    Args:
        name: "" for the TPUs of this machine; or a virtual or described slice: "virtual:v5e:2x4".
        caller: The name that errors show instead of this function's.

    Raises:
        NotFoundError: No such system was found.

    Example:
        >>> jaxdist.tpu.system_of("virtual:v5e:2x4").topology
        Topology(2x4x1 chips, 1 core each, 2 tasks)
    """
    remedy = "Pass for instance name=''."
    check_instance("name", name, str, "a string", remedy)
    if caller is None:
        caller = f"tpu.system_of(name={name!r})"
    check_text("caller", caller, "my_function")
    if name not in _FOUND:
        _FOUND[name] = call_as(caller, _system.find, name)
    return _FOUND[name]


def _read_name(cluster_resolver: Any) -> str:
    """Return the name of the system of a resolver, for a call that is outside of any step."""
    if cluster_resolver is not None and not hasattr(cluster_resolver, "tpu_name"):
        raise refuse_type(
            f"cluster_resolver={show(cluster_resolver)}.",
            "cluster_resolver is a TPUClusterResolver.",
            "Pass jaxdist.cluster_resolver.TPUClusterResolver(''), or nothing for the TPUs of "
            "this machine.",
        )
    if _compat.is_inside_trace():
        raise ContextError(
            f"{name_call()} was called inside a step or a traced function.\n\n"
            "It looks for the devices of this machine, which is done once, before any step.\n\n"
            "Call it at the start of the program, outside jit, function and run."
        )
    return _LOCAL if cluster_resolver is None else cluster_resolver.tpu_name
