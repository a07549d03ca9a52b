"""Divides GPUs among processes, without JAX: the launcher would then hold their memory."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping

from jaxdist._called import name_call
from jaxdist._gpu_settings import list_visible_gpus
from jaxdist.errors import LaunchError

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def divide_gpus(
    count: int,
    each: int,
    environment: Mapping[str, str],
    list_gpus: Callable[[], list[str]],
) -> list[str] | None:
    """Return `CUDA_VISIBLE_DEVICES` of each process; None if JAX uses no GPU.

    Args:
        count: Number of processes.
        each: Number of GPUs of each process.
        environment: The environment of the launcher.
        list_gpus: Returns the GPUs of this machine, as `CUDA_VISIBLE_DEVICES` names them.

    Raises:
        LaunchError: There are too few GPUs for the processes.
    """
    if not uses_gpus(environment):
        return None
    present, visible = list_gpus(), list_visible_gpus(environment)
    gpus = present if visible is None else present and visible
    if not gpus:
        return None
    if count * each > len(gpus):
        given = environment.get("CUDA_VISIBLE_DEVICES")
        where = "" if given is None else f" in CUDA_VISIBLE_DEVICES={given}"
        most = len(gpus) // each
        fewer = (
            f"Start {most} process(es)" if most else f"Request {len(gpus)} device(s) in one process"
        )
        raise LaunchError(
            f"{name_call()} needs {count * each} GPUs for {count} processes, and there are "
            f"{len(gpus)}{where}.\n\nEach process gets {each} GPU(s) that no other process "
            f"uses.\n\n{fewer}, or set JAX_PLATFORMS=cpu to run the processes on the CPU."
        )
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(count)]


def uses_gpus(environment: Mapping[str, str]) -> bool:
    """Whether JAX_PLATFORMS allows GPUs."""
    platforms = environment.get("JAX_PLATFORMS", "")
    return not platforms or bool({"cuda", "gpu"} & set(platforms.split(",")))


def list_gpus() -> list[str]:
    """Return the numbers of this machine's GPUs, if JAX has a plugin that uses them."""
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        return []
    return find_device_files(pathlib.Path("/dev")) or _ask_driver()


def find_device_files(folder: pathlib.Path) -> list[str]:
    """Return one number for each `nvidia<number>` in a folder, from 0."""
    found = [entry for entry in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name)]
    # In a container the files may have the numbers of the host; CUDA counts from 0.
    return [str(number) for number in range(len(found))]


def _ask_driver() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        listed = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=30, env=dict(os.environ)
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))]
