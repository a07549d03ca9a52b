"""The child's side: commands as JSON lines on stdin, answers as JSON lines on stdout.

Runs in an environment without JAX too (the TensorFlow arms), so it imports nothing of either.

    {"make": "module:function", "params": {...}}   build a loop
    {"burst": steps}                               time it: {"wall": seconds, "cpu": seconds}
    {"facts": true}                                ask it what became of it
    {"call": "module:function", "params": {...}}   call a function, whose result is the answer

The first three say which loop with "loop": name, where one process holds several.
An answer is `{"value": ...}` or `{"error": traceback}`. The end of stdin ends the process.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

from benchmarks._loop import Loop


class Worker:
    """Holds the loops of this process."""

    def __init__(self) -> None:
        self._loops: dict[str, Loop] = {}

    def answer(self, command: dict[str, Any]) -> Any:
        """Do what one command says."""
        name = command.get("loop", "")
        if "make" in command:
            self._loops.pop(name, None)
            gc.unfreeze()
            self._loops[name] = _resolve(command["make"])(**command["params"])
            return None
        if "call" in command:
            return _resolve(command["call"])(**command["params"])
        loop = self._loops.get(name)
        if loop is None:
            raise RuntimeError(f"no loop has been made yet: {command}")
        if "facts" in command:
            return loop.facts()
        return timed(loop, command["burst"])


def timed(loop: Loop, steps: int) -> dict[str, float]:
    """Wall and process CPU time of a burst."""
    loop.prepare(steps)
    # Whatever lives now would be looked through again at every collection of the loop.
    gc.collect()
    gc.freeze()
    cpu, wall = time.process_time(), time.perf_counter()
    loop.run(steps)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall": wall, "cpu": cpu}


def _resolve(name: str) -> Any:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    """Answer until stdin ends."""
    # Libraries print; whatever they print goes to stderr, and only answers to the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        try:
            answer = {"value": worker.answer(json.loads(line))}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
