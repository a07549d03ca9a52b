"""The tables of `jaxdist info` about GPUs: driver, links, memory, and recommended settings."""

import collections
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxdist._gpu_settings import TRAININGS, generation_of_kind, list_settings
from jaxdist.cli._info.processes import find_flag

# Runs a command, and returns its output; empty if it failed.
Run = Callable[[Sequence[str]], str]

# JAX takes this share of the memory by default.
_SHARE = "0.75 (JAX's default)"
# The meanings of the words of `nvidia-smi topo -m`. NV18 is 18 NVLinks.
_WORDS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe of one CPU",
    "NODE": "the PCIe of one NUMA node",
    "SYS": "the link between CPUs",
}


def run_command(command: Sequence[str]) -> str:
    """Run a command, and return its output; empty if the command does not exist or fails."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def list_gpu_facts(
    platform_version: str,
    environment: Mapping[str, str] = os.environ,
    run: Run = run_command,
    root: Path = Path("/"),
) -> list[tuple[str, str]]:
    """List facts about the GPUs of this system: names and values.

    Args:
        platform_version: The platform version of JAX's backend.
        environment: The environment variables.
        run: Runs `nvidia-smi`.
        root: The folder that contains `sys`.
    """
    summary = run(["nvidia-smi"])
    share = environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _SHARE)
    if environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        share = f"taken as it is needed, up to {share}"
    rows = [
        ("driver", _find(r"Driver Version: *(\S+)", summary)),
        ("CUDA of the driver", _find(r"CUDA Version: *(\S+)", summary)),
        ("CUDA of JAX", " ".join(platform_version.split()) or "not reported by JAX"),
        ("share of the memory for JAX", share),
    ]
    pairs = count_links(run(["nvidia-smi", "topo", "-m"]))
    links = [f"{count} pairs by {_describe_link(word)}" for word, count in pairs.items()]
    rows.append(("links of the GPUs", ", ".join(links) or "one GPU, or not reported by nvidia-smi"))
    rows += _list_network_cards(root) or [("network", "no InfiniBand or RoCE card is listed")]
    return rows


def count_links(matrix: str) -> dict[str, int]:
    """Count the pairs of GPUs by link in the output of `nvidia-smi topo -m`."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines()]
    rows = [words for words in lines if words and re.fullmatch(r"GPU\d+", words[0])]
    # The header line of the matrix begins with GPU0, too. A row has an X for the GPU itself.
    rows = [words for words in rows if "X" in words]
    cells = [
        words[1 + other]
        for index, words in enumerate(rows)
        for other in range(index + 1, len(rows))
    ]
    return dict(collections.Counter(cells))


def _describe_link(word: str) -> str:
    if re.fullmatch(r"NV\d+", word):
        return f"{word[2:]} NVLinks"
    return _WORDS.get(word, word)


def _list_network_cards(root: Path) -> list[tuple[str, str]]:
    rates = sorted((root / "sys" / "class" / "infiniband").glob("*/ports/*/rate"))
    return [(f"network card {rate.parts[-4]}", rate.read_text().strip()) for rate in rates]


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else "not reported by nvidia-smi"


def list_gpu_settings(
    device_kind: str, environment: Mapping[str, str] = os.environ
) -> list[tuple[str, str, str, str, str]]:
    """List the recommended settings: name, recommendation, value, purpose, and when it helps.

    Args:
        device_kind: JAX's name of the GPU. If its generation is unknown, only the settings that all
            generations share are listed.
        environment: The environment variables.
    """
    flags = environment.get("XLA_FLAGS", "").split()
    rows: dict[str, tuple[str, str, str, str, str]] = {}
    for training in TRAININGS:
        generation = generation_of_kind(device_kind) or ""
        for setting in list_settings(training, generation, layer_bytes=None, gradient_bytes=None):
            flag = f"{setting.name}={setting.value}"
            now = find_flag(flags, flag) if setting.is_flag else environment.get(setting.name)
            purpose = "any" if setting.name in rows else training
            helps = f"{setting.helps} ({setting.source})"
            rows[setting.name] = (setting.name, setting.value, now or "unset", purpose, helps)
    return list(rows.values())
