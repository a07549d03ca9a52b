"""Connects this process to the other processes of its job."""

import glob
import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist._called import call_as, name_call, refuse
from jaxdist._compat import have_backends_started, set_gloo_address, uses_gloo
from jaxdist._processes.addresses import find_bind_address, is_loopback, split_address
from jaxdist._processes.joining.claims import Answers, claim, describe_this_process
from jaxdist._processes.joining.launched import SERVICE, use_launched_devices
from jaxdist._processes.joining.leaving import leave_at_exit
from jaxdist._processes.joining.pairs import try_pairs
from jaxdist._processes.joining.roll_call import RollCall
from jaxdist._processes.own_address import INTERFACE, Machine, find_own_address
from jaxdist._processes.process import Process
from jaxdist._processes.settings import Settings, get_settings
from jaxdist._processes.store import get_store
from jaxdist._validate import as_integer
from jaxdist.errors import BackendStartedError, ClusterError, ContextError

_LOG = logging.getLogger("jaxdist")

_SECONDS_FOR_OTHERS = 1.0
_FLAG = "xla_cpu_collective_timeout_seconds"
_own_address: list[str] = []
# The cluster that this process has joined, and its index there.
_joined: list[tuple[tuple[str, ...], int]] = []


def get_own_address() -> str | None:
    """Return the address at which the others reach this process; None before `join`."""
    return _own_address[0] if _own_address else None


def is_connected() -> bool:
    """Whether this process has joined the other processes of its job."""
    return jax.distributed.is_initialized()


def join(addresses: Sequence[str], index: int) -> Process:
    """Join the other processes of a cluster; call it before the first use of a device.

    A second call with the same cluster does nothing. See Note [Roll call], Note [Address of gloo]
    and Note [Pairs of gloo].

    Cost:
        Waits until all processes have called it, at most `join_seconds`. Processes without GPUs or
        TPUs then test their connections, which takes at most as long again.

    Args:
        addresses: `host:port` of each process. JAX's coordination service uses the first, unless a
            launcher hosts it (`JAXDIST_SERVICE`).
        index: Which of them this process is.

    Returns:
        This process.

    Raises:
        BackendStartedError: JAX has used its devices already.
        ClusterError: Processes do not come in time, have another cluster or other versions, or
            cannot connect to each other; the coordination service cannot be reached; or a port is
            in use.
        DuplicateTaskError: Two processes have the same index.
        ContextError: This process has joined another cluster.
    """
    count = len(addresses)
    index = as_integer("index", index, least=0, most=count - 1)
    plan = (tuple(addresses), index)
    if _joined == [plan]:
        return Process(index, count)
    if _joined or is_connected():
        raise refuse(
            f"a cluster of {count} processes, and this process has joined "
            f"{f'one of {len(_joined[0][0])}' if _joined else 'a job'} already.",
            "A process joins one cluster, once.",
            "Use one cluster for all strategies of a process; or leave out what joins first "
            "(jax.distributed.initialize, experimental_connect_to_cluster).",
            kind=ContextError,
        )
    if have_backends_started():
        raise BackendStartedError(
            f"{name_call()} cannot join the {count} processes of the job: JAX has already used the "
            "devices of this process.\n\n"
            "The processes join before the first array, jax.devices() or jax.random.key.\n\n"
            f"Move {name_call()}(...) to the top of the program, behind the imports."
        )
    settings = get_settings()
    for address in addresses:
        split_address(address)
    service = os.environ.get(SERVICE, "")
    if service:
        call_as(f"The environment variable {SERVICE}", split_address, service)
    use_launched_devices()
    answers = _meet(addresses, index, service, settings)
    try:
        # JAX's service needs the port of process 0, unless a launcher hosts it. With a launcher,
        # process 0 answers until all have joined: some may not have asked it yet.
        if not service:
            answers.close()
        _set_collective_limit(settings)
        _initialize(addresses, index, service, settings)
    finally:
        answers.close()
    _joined.append(plan)
    leave_at_exit()
    # Only now: names of pods may have no address before all processes have come.
    own = _choose_address(addresses, index, service)
    _own_address[:] = [own]
    # The backend waits for the devices of all processes, which have all come by now.
    jax.local_devices()
    store = get_store()
    if jax.default_backend() == "cpu" and uses_gloo() and store is not None:
        try_pairs(own, Process(index, count), store, settings.join_seconds)
    return Process(index, count)


def connect(**how: Any) -> None:
    """Join the other hosts of a TPU slice, which JAX finds; call it before a device is used.

    Cost:
        Waits until all processes have called it.

    Args:
        **how: Arguments of `jax.distributed.initialize`; without them, JAX detects the processes.

    Raises:
        RuntimeError: JAX has started, or this process has joined already.
        ValueError: JAX detects no other processes.

    Source:
        `jax.distributed.initialize`.
    """
    _choose_how_to_fail()
    jax.distributed.initialize(**how)
    leave_at_exit()


def _choose_address(addresses: Sequence[str], index: int, service: str) -> str:
    """Return the address of this process for collectives, and set it for JAX and NCCL."""
    machine = Machine()
    found = find_own_address(addresses, index, service, machine)
    if found is None:
        name = socket.gethostname()
        known = machine.find_addresses(name)
        if not known:
            raise ClusterError(
                f"Process {index} has no address for collectives: {addresses[index]} is not an "
                "address of this machine, no other process can be reached, and the host name "
                f"{name} has no address.\n\n"
                "Collectives between processes need an address of this machine.\n\n"
                "Write an address of this machine into the cluster, or add the host name to "
                "/etc/hosts. `jaxdist resolve` shows what a process would use."
            )
        return known[0]
    _LOG.info("Collectives of process %d use %s, %s.", index, found.address, found.reason)
    set_gloo_address(found.address)
    _choose_interface(found.address, machine)
    return found.address


def _choose_interface(address: str, machine: Machine) -> None:
    """Make NCCL use the network of the cluster, unless the user has chosen one."""
    if is_loopback(address) or os.environ.get(INTERFACE) or not machine.has_gpus():
        return
    interface = machine.find_interface(address)
    if interface is not None:
        # With `=` the name is exact; without it, NCCL takes all interfaces that begin with it.
        os.environ[INTERFACE] = f"={interface}"
        _LOG.info("%s=%s, the interface of %s.", INTERFACE, os.environ[INTERFACE], address)


def _meet(addresses: Sequence[str], index: int, service: str, settings: Settings) -> Answers:
    """Return the answers of this process when all others have come; see Note [Roll call]."""
    me = describe_this_process(index, addresses)
    answers = claim(addresses[index], me)
    call = RollCall(addresses, me, answers, settings.join_seconds)
    try:
        if not answers.can_answer:
            # The address belongs to a proxy or a service in front of this process, so the others
            # cannot ask here. JAX itself then waits for them.
            _LOG.info(
                "%s is not an address of this machine; JAX waits for the others.", addresses[index]
            )
        elif index == 0:
            call.wait_for_all()
            answers.say(is_complete=bool(service))
        else:
            call.wait_for_first(is_service_elsewhere=bool(service))
        if service or index != 0:
            call.wait_for_service(service or addresses[0])
    except BaseException as error:
        if isinstance(error, ClusterError):
            # The others ask at least this often, so each of them still sees what does not fit.
            time.sleep(_SECONDS_FOR_OTHERS)
        answers.close()
        raise
    return answers


def _initialize(addresses: Sequence[str], index: int, service: str, settings: Settings) -> None:
    _choose_how_to_fail()
    bind = "127.0.0.1:0" if service else find_bind_address(addresses)
    try:
        jax.distributed.initialize(
            coordinator_address=service or addresses[0],
            num_processes=len(addresses),
            process_id=index,
            cluster_detection_method="deactivate",
            coordinator_bind_address=bind,
            initialization_timeout=math.ceil(settings.join_seconds),
            heartbeat_timeout_seconds=math.ceil(settings.heartbeat_seconds),
            # The wait at the end is short: `leave` has made sure that all are ready.
            shutdown_timeout_seconds=math.ceil(settings.heartbeat_seconds),
        )
    except jax.errors.JaxRuntimeError as error:
        raise ClusterError(
            f"Process {index} could not join the {len(addresses)} processes of the job at "
            f"{service or addresses[0]}: {str(error).splitlines()[0]}\n\n"
            "All processes reach JAX's coordination service at that address.\n\n"
            "`jaxdist resolve` shows what this process would use, and what looks wrong."
        ) from error


def _choose_how_to_fail() -> None:
    # Otherwise JAX's runtime handles SIGTERM, and the process does not end.
    jax.config.update("jax_enable_preemption_service", False)
    # Otherwise the death of one process ends all others with SIGABRT, before they can say why.
    jax.config.update("jax_enable_recoverability", True)


def _set_collective_limit(settings: Settings) -> None:
    """Set how long XLA lets one collective between CPU processes wait."""
    flags = os.environ.get("XLA_FLAGS", "")
    # The flag is for CPUs. TPU runtimes also read XLA_FLAGS, and refuse flags that they do not
    # know. A value that the user has set stays.
    if f"--{_FLAG}" in flags or glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"):
        return
    os.environ["XLA_FLAGS"] = f"{flags} --{_FLAG}={math.ceil(settings.collective_seconds)}".strip()
