"""The table of `jaxdist info` for jobs of several processes: settings of jaxdist, and of users.

Sources: JAX's pages on GPU performance and on multi-process programs.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from jaxdist._processes import INTERFACE, get_settings, variable_of


class Row(NamedTuple):
    """One variable or flag.

    Args:
        name: Its name.
        now: The value in this process.
        who: Who sets it: jaxdist or the user.
        why: What it does, and when to set it.
    """

    name: str
    now: str
    who: str
    why: str


# Flags in XLA_FLAGS, and variables of NCCL and JAX, that jaxdist never sets. Those that make
# training faster are in `jaxdist/_gpu_settings.py`.
_FOR_GPUS = (
    (
        "--xla_gpu_nccl_terminate_on_error=false",
        "the others survive when a process has ended; needs --xla_gpu_nccl_async_execution=true",
    ),
)
_VARIABLES_FOR_GPUS = (
    ("NCCL_IB_DISABLE", "1 uses sockets instead of InfiniBand, to find a fault; several hosts"),
    ("NCCL_LAUNCH_ORDER_IMPLICIT", "1 where one process has several GPUs"),
    (
        "NCCL_PROTO",
        "SIMPLE,LL,LL128, with NCCL_LL_BUFFSIZE=-2 and NCCL_LL128_BUFFSIZE=-2; one host",
    ),
    (
        "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE",
        "1 ends collectives of a process that ended",
    ),
)


def list_settings(platform: str, environment: Mapping[str, str] = os.environ) -> list[Row]:
    """List the settings that matter to several processes on this machine.

    Args:
        platform: `"cpu"`, `"gpu"` or `"tpu"`.
        environment: The environment variables.
    """
    flags = environment.get("XLA_FLAGS", "").split()
    settings = get_settings()
    rows = [
        Row(variable_of(name), _show(value), "you", why)
        for name, value, why in (
            ("quiet_seconds", settings.quiet_seconds, "without progress: report who is behind"),
            ("heartbeat_seconds", settings.heartbeat_seconds, "without a heartbeat: has ended"),
            ("join_seconds", settings.join_seconds, "wait for the others at the start"),
            ("abort_seconds", settings.abort_seconds, "without progress: end with code 75"),
            ("collective_seconds", settings.collective_seconds, "the most for one collective"),
            ("rpc_seconds", settings.rpc_seconds, "wait for the reply of another task"),
        )
    ]
    joined, alive = "on when processes join", "the others survive when a process has ended"
    rows.append(Row("jax_enable_recoverability", joined, "jaxdist", alive))
    apart, ends = "off when processes join", "otherwise SIGTERM would not end a process"
    rows.append(Row("jax_enable_preemption_service", apart, "jaxdist", ends))
    if platform == "cpu":
        flag = "--xla_cpu_collective_timeout_seconds"
        now = find_flag(flags, flag)
        rows.append(Row(flag, now, "jaxdist, if unset", "ends a stuck collective"))
    if platform == "gpu":
        visible = environment.get("CUDA_VISIBLE_DEVICES", "unset")
        one = "one GPU for each process"
        rows.append(Row("CUDA_VISIBLE_DEVICES", visible, "jaxdist launch", one))
        interface = environment.get(INTERFACE, "unset")
        rows.append(Row(INTERFACE, interface, "jaxdist, if unset", "network of several hosts"))
        rows += [Row(f.split("=")[0], find_flag(flags, f), "you", w) for f, w in _FOR_GPUS]
        rows += [Row(v, environment.get(v, "unset"), "you", w) for v, w in _VARIABLES_FOR_GPUS]
    return rows


def _show(value: float | None) -> str:
    return "never" if value is None else f"{value:g} s"


def find_flag(flags: list[str], flag: str) -> str:
    """Return the value of a flag among those of XLA_FLAGS, or "unset"."""
    name = flag.split("=")[0]
    found = [f for f in flags if f.split("=")[0] == name]
    return found[-1].partition("=")[2] or "on" if found else "unset"
