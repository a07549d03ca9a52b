"""Finds devices by name, and limits the steps in flight."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._called import called, name_call, refuse
from jaxdist._validate import as_integer, as_list, show
from jaxdist.errors import (
    ArgumentTypeError,
    BackendStartedError,
    DeviceError,
)

_NAME = re.compile(
    r"^(?:/job:(?P<job>[^/]+))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"/?(?:device:)?(?P<kind>[a-z]+)(?::(?P<index>\d+|\*))?$",
    re.IGNORECASE,
)
_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}
_XLA_FLAG = "--xla_force_host_platform_device_count"

# JAX's CPU backend can deadlock and abort when many steps with collectives wait on its thread
# pool: collectives of different steps then wait for each other's threads. Waiting for the devices
# every few steps costs no throughput.
MAX_STEPS_IN_FLIGHT_ON_CPU = 8


def device_from_name(name: str | jax.Device, given_to: str = "") -> jax.Device:
    """Return the device that a documented name refers to.

    Args:
        name: `"cpu:0"`, `"GPU:1"`, `"/device:TPU:0"`, the full
            `"/job:localhost/replica:0/task:0/device:CPU:0"`, or a `jax.Device`, which is returned.
        given_to: The call and the parameter that received the name, for errors.

    Returns:
        The device.

    Raises:
        DeviceError: The device does not exist; the message lists those that do.
        ArgumentTypeError: `name` is neither a string nor a `jax.Device`.

    Example:
        >>> device_from_name("/job:localhost/replica:0/task:0/device:CPU:1").id
        1

    Source:
        Device strings of `tf.distribute.MirroredStrategy`.
    """
    if isinstance(name, jax.Device):
        return name
    where = f"{given_to}: " if given_to else ""
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"{where}{show(name)}, is not a device.\n\n"
            "A device is a jax.Device, or a string such as 'cpu:0'.\n\n"
            f"Use one of {list_device_names()}."
        )
    # Checked part by part, from kind to index, so that each mistake gets its own message.
    match = _NAME.match(name.strip())
    kind = match["kind"].lower() if match else ""
    if match is None or kind not in _PLATFORMS:
        raise DeviceError(
            f"{where}device {name!r} is not the name of a device.\n\n"
            "A device is named 'KIND:INDEX' with KIND one of cpu, gpu, tpu, or "
            "'/job:localhost/replica:0/task:0/device:KIND:INDEX'.\n\n"
            f"Use one of {list_device_names()}."
        )
    if (match["job"] or "localhost").lower() != "localhost":
        raise DeviceError(
            f"{where}device {name!r} is on job {match['job']!r}.\n\n"
            "A strategy works on the devices of this process, job 'localhost'.\n\n"
            f"Use one of {list_device_names()}."
        )
    # A name without a task means a device of this process.
    task = None if match["task"] is None else int(match["task"])
    by_task = _group_by_task(_PLATFORMS[kind])
    if int(match["replica"] or 0) or (task is not None and task not in by_task and task != 0):
        raise DeviceError(
            f"{where}device {name!r} is on replica:{match['replica'] or 0}, task:{task or 0}.\n\n"
            f"There are {len(by_task)} process(es) with {kind.upper()} devices, as replica:0 and "
            f"task:{', task:'.join(map(str, by_task)) or 0}.\n\n"
            f"Use one of {list_device_names()}."
        )
    # TensorFlow writes `device:GPU:*` for any GPU; here it is the first one.
    index = int(match["index"]) if match["index"] not in (None, "*") else 0
    present = local_devices(_PLATFORMS[kind]) if task is None else by_task.get(task, [])
    if index >= len(present):
        owner = "this process" if task is None or len(by_task) <= 1 else f"process {task}"
        raise DeviceError(
            f"{where}device {name!r} does not exist: {owner} has {len(present)} "
            f"{kind.upper()} device(s).\n\nDevices of a kind are numbered from 0.\n\nUse one of "
            f"{list_device_names()}" + _virtual_hint(kind, index)
        )
    return present[index]


def _virtual_hint(kind: str, index: int) -> str:
    if kind != "cpu":
        return "."
    return f", or request more before JAX starts: jaxdist.testing.virtual_devices({index + 1})."


def local_devices(platform: str | None = None) -> list[jax.Device]:
    """Return this process's devices on `platform` (`None`: the default backend); may be `[]`."""
    try:
        return list(jax.local_devices(backend=platform))
    except RuntimeError:  # JAX raises where the backend does not exist
        return []


def _group_by_task(platform: str) -> dict[int, list[jax.Device]]:
    """Return the devices of each process of the job, including those that this one cannot use."""
    try:
        devices = jax.devices(platform)
    except RuntimeError:  # JAX raises where the backend does not exist
        return {}
    found: dict[int, list[jax.Device]] = {}
    for device in devices:
        found.setdefault(device.process_index, []).append(device)
    return found


def list_device_names() -> list[str]:
    """List the names of this process's devices, as `device_from_name` accepts them."""
    # Without duplicates: the default backend may be the CPU.
    kinds = dict.fromkeys([jax.default_backend(), "cpu"])
    return [f"{k}:{i}" for k in kinds for i, _ in enumerate(local_devices(k))]


def default_devices() -> list[jax.Device]:
    """Return all local devices of JAX's default backend: accelerators, or CPUs without any."""
    return local_devices()


def device_name(device: jax.Device) -> str:
    """Return the full documented name of a device, which is the same in all processes of a job.

    The task is the number of the device's process, and the index counts the devices of a process.

    Example:
        >>> device_name(jax.devices()[0])
        '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    platform = "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform
    present = _group_by_task(device.platform).get(device.process_index, [])
    index = present.index(device) if device in present else device.id
    task = device.process_index
    return f"/job:localhost/replica:0/task:{task}/device:{platform.upper()}:{index}"


def distinct_devices(
    names: Sequence[str | jax.Device], parameter: str = "devices"
) -> list[jax.Device]:
    """Return the devices for `names`; raise if one is listed twice or kinds are mixed."""
    caller = name_call()
    listed = as_list(
        parameter,
        names,
        "a list of devices or of their names",
        f"Pass for instance {parameter}={list_device_names()[:2]}.",
    )
    devices = [device_from_name(n, f"{caller}({parameter}=...)") for n in listed]
    # Compared as devices: `"cpu:0"` and its full name are the same one.
    twice = sorted({str(d) for d in devices if devices.count(d) > 1})
    if twice:
        raise refuse(
            f"{parameter} with the same device twice: {twice} in {list(map(str, listed))}.",
            "Each replica has its own device.",
            "List each device once.",
            kind=DeviceError,
        )
    platforms = sorted({d.platform for d in devices})
    if len(platforms) > 1:
        raise refuse(
            f"{parameter} of different kinds: {platforms} in {list(map(str, listed))}.",
            "Replicas run one program together, so they need one kind of device.",
            f"Use devices of one of {platforms}.",
            kind=DeviceError,
        )
    return devices


@called("virtual_devices")
def virtual_devices(count: int) -> None:
    """Make JAX provide `count` CPU devices; call it before anything uses a device.

    They behave as `count` separate devices but share the cores of this machine. Programs and
    results are the same as on `count` real devices; speed is not.

    Args:
        count: Number of CPU devices. Requesting the current number again is valid at any time.

    Raises:
        BackendStartedError: JAX has started with another number of CPU devices, which cannot
            change in this process.
        ArgumentError: `count` is below 1.
        ArgumentTypeError: `count` is not an int.

    Example:
        >>> virtual_devices(8)
        >>> len(jax.devices("cpu"))
        8

    Source:
        Replaces `tf.config.set_logical_device_configuration`. In JAX itself this is
        `jax.config.update("jax_num_cpu_devices", count)`.
    """
    count = as_integer("count", count, least=1, remedy="Pass for instance virtual_devices(8).")
    # After its start JAX refuses the update, even if XLA_FLAGS already gives this number.
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        present = len(jax.local_devices(backend="cpu"))
        if present != count:
            raise _make_started_error(count, present) from None


def _make_started_error(count: int, present: int) -> BackendStartedError:
    flag = next((f for f in os.environ.get("XLA_FLAGS", "").split() if f.startswith(_XLA_FLAG)), "")
    origin = f" (XLA_FLAGS has {flag}: remove it, or set it to {count})" if flag else ""
    return refuse(
        f"count={count}, and JAX has already started, with {present} CPU device(s){origin}.",
        "The number of devices is fixed when JAX first touches one (jax.devices(), jnp.zeros(3), "
        "a strategy).",
        f"Call jaxdist.testing.virtual_devices({count}) first thing, right after the imports. In "
        "a notebook, restart the runtime, then run that cell before any other.",
        kind=BackendStartedError,
    )


class StepsInFlight:
    """A limit on the number of steps that wait on the devices of one backend.

    A caller waits before it starts a step. At that moment the step has donated and assigned
    nothing, so Ctrl-C during the wait loses nothing.
    """

    __slots__ = ("_count", "_newest")

    def __init__(self) -> None:
        self._count = 0
        self._newest: Any = None

    def make_room(self) -> None:
        """Wait for the earlier steps if the limit is reached; call it before each step."""
        if self._count >= MAX_STEPS_IN_FLIGHT_ON_CPU:
            # Reset before the wait: if Ctrl-C interrupts it, later steps are counted from zero.
            newest, self._newest, self._count = self._newest, None, 0
            # The caller may have donated this result since; JAX cannot wait for a deleted array.
            if newest is not None and not newest.is_deleted():
                jax.block_until_ready(newest)

    def count_step(
        self, outputs: Any, leaves: Callable[[Any], Sequence[Any]] = jax.tree.leaves
    ) -> None:
        """Count a dispatched step; `leaves` returns the leaves of its outputs."""
        self._count += 1
        # Only the last step keeps a result, since the devices run steps in order. The smallest
        # result holds the least memory until the next step.
        if self._count >= MAX_STEPS_IN_FLIGHT_ON_CPU:
            arrays = filter(_compat.is_concrete, leaves(outputs))
            self._newest = min(arrays, key=lambda x: x.nbytes, default=None)


CPU_STEPS = StepsInFlight()
