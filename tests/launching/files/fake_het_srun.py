"""Stands for `srun` in a job of several components: starts the tasks of one on this machine.

It refuses options that srun does not have. FAKE_LOG gets a line for each step.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

_OPTIONS = ("--het-group", "--ntasks", "--kill-on-bad-exit", "--cpus-per-task")


def main() -> None:
    """Start the tasks, and end with the highest of their exit codes, as srun does."""
    arguments, options = sys.argv[1:], {}
    while arguments[0].startswith("-"):
        name, _, value = arguments.pop(0).partition("=")
        if name not in _OPTIONS:
            sys.exit(f"srun: unrecognized option '{name}'")
        options[name] = value
    with pathlib.Path(os.environ["FAKE_LOG"]).open("a") as log:
        log.write(f"{options['--het-group']} {options['--ntasks']}\n")
    tasks = []
    for rank in range(int(options["--ntasks"])):
        own = {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": "127.0.0.1"}
        tasks.append(subprocess.Popen(arguments, env={**os.environ, **own}, process_group=0))

    def end(*_: object) -> None:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)

    # As srun does: a signal ends the step.
    signal.signal(signal.SIGTERM, end)
    while any(task.poll() is None for task in tasks):
        if options.get("--kill-on-bad-exit") == "1" and any(task.poll() for task in tasks):
            end()
        time.sleep(0.02)
    codes = [task.returncode for task in tasks]
    sys.exit(max(code if code >= 0 else 128 - code for code in codes))


if __name__ == "__main__":
    main()
