"""Processes of an arm that it starts itself: tasks, and workers that it lets take steps."""

import atexit
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence


class Child:
    """A process that ends with this one.

    Args:
        arguments: What Python gets.
        environ: Its environment; None is that of this process.
    """

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._name = " ".join(arguments)
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        atexit.register(self._process.kill)

    def read(self) -> str:
        """Return its next line."""
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended with code {self._process.wait()}")
        return line.strip()

    def write(self, text: str) -> None:
        """Send it a line."""
        if self._process.stdin is not None:
            self._process.stdin.write(f"{text}\n")
            self._process.stdin.flush()


def answer_lines(step: Callable[[int], object]) -> None:
    """Be a child that takes as many steps as each line of its input says, and says when done."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(step(int(line)), flush=True)


def share(children: Sequence[Child], steps: int) -> list[str]:
    """Let children take that many steps in all, and return what they say of them."""
    count = len(children)
    for number, child in enumerate(children):
        child.write(str(steps // count + (number < steps % count)))
    return [child.read() for child in children]
