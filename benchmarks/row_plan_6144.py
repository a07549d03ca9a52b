"""A plan for the largest slice is a matter of seconds.

Claim: `jaxdist plan` for 6,144 chips (v5p 16x16x24) takes under 15 s and under 4 GiB on 2 cores,
from start to end of the process. The memory is a count; of the time, wall and CPU are told, since
what else the machine does is in both.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks._bench import Bench
from benchmarks._lines import CountLine, Line, NoteLine

ROW = "plan"
CONFIGS = ("configs/digits_mirrored.toml", "configs/topics_lm_data_parallel.toml")
MOST_BYTES = 4 << 30


def planned(config: str, topology: str) -> tuple[str, float, float, int]:
    """What was printed, wall and CPU seconds, and the most memory, of one command."""
    command = [sys.executable, "-m", "jaxdist", "plan", config, "--topology", topology]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if process.stdout is None:
        raise RuntimeError("no output to read")
    printed = process.stdout.read().decode()
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    if status:
        return f"failed with {os.waitstatus_to_exitcode(status)}", wall, 0.0, 0
    return printed, wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def run(bench: Bench) -> Iterator[Line]:
    """Plan each configuration."""
    topology, chips = ("v5e:2x2", 4) if bench.options.is_smoke else ("v5p:16x16x24", 6144)
    for config in CONFIGS[:1] if bench.options.is_smoke else CONFIGS:
        printed, wall, cpu, most = planned(config, topology)
        found = f"{chips:,} chips" if f" {chips:,} chips" in printed else printed[:200]
        size = "under 4 GiB" if most < MOST_BYTES else f"{most / (1 << 30):.1f} GiB"
        yield CountLine(
            ROW, topology, config, "", f"{found}, {size}", f"{chips:,} chips, under 4 GiB"
        )
        yield NoteLine(
            ROW,
            f"{config} for {topology}: {wall:.1f} s, CPU {cpu:.1f} s, {most / (1 << 20):.0f} MiB",
        )
