"""Stands for `srun`: starts the tasks of a step on this machine, with the variables of Slurm.

It takes the number of tasks from SLURM_NTASKS, which sbatch sets, and refuses options that srun
does not have.
"""

import os
import pathlib
import subprocess
import sys

_OPTIONS = ("--label", "--kill-on-bad-exit", "--wait", "--cpus-per-task")


def main() -> None:
    """Start the tasks, and end with the highest of their exit codes, as srun does."""
    arguments = sys.argv[1:]
    while arguments[0].startswith("-"):
        option = arguments.pop(0)
        if option.partition("=")[0] not in _OPTIONS:
            sys.exit(f"srun: unrecognized option '{option}'")
    count = int(os.environ["SLURM_NTASKS"])
    steps = pathlib.Path(os.environ["FAKE_STEPS"])
    step = len(steps.read_text()) if steps.exists() else 0
    steps.write_text("x" * (step + 1))
    tasks = []
    for rank in range(count):
        own = {
            "SLURM_STEP_ID": str(step),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_TASKS_PER_NODE": str(count),
        }
        tasks.append(subprocess.Popen(arguments, env={**os.environ, **own}))
    sys.exit(max(task.wait() for task in tasks))


if __name__ == "__main__":
    main()
