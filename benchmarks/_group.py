"""An arm of several processes that work together."""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from benchmarks._process import ArmError, ArmProcess, name_of

_LOOK_S = 0.05


class ArmGroup:
    """Processes that all do the same, told apart by `rank`; used like an `ArmProcess`.

    Each function is called with `rank` and `ports`, one free port of this machine for each.

    Args:
        python: Interpreter to run.
        devices: CPU devices of each process, or None where there is no JAX.
        count: How many processes.
    """

    def __init__(self, python: str, *, devices: int | None, count: int) -> None:
        self.ports = _free_ports(count)
        self._members = [ArmProcess(python, devices=devices) for _ in range(count)]

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [member.pid for member in self._members]

    def call(self, function: Callable[..., Any], timeout_s: float = 600, **params: Any) -> Any:
        """Call a function in all of them; what the first one says."""
        return self._ask("call", function, timeout_s, params)[0]

    def make(self, function: Callable[..., Any], **params: Any) -> None:
        """Build the loops."""
        self._ask("make", function, 600, params)

    def burst(self, steps: int, timeout_s: float = 600) -> tuple[float, float]:
        """Run the loops: the wall time of the last to end, the CPU time of all; for a step."""
        spent = self._answers([{"burst": steps}] * len(self._members), timeout_s)
        wall, cpu = max(s["wall"] for s in spent), sum(s["cpu"] for s in spent)
        return wall / steps, cpu / steps

    def facts(self) -> dict[str, Any]:
        """What the first loop says of itself."""
        return self._members[0].facts()

    def close(self) -> None:
        """End all."""
        for member in self._members:
            member.close()

    def _ask(
        self, how: str, function: Callable[..., Any], timeout_s: float, params: dict[str, Any]
    ) -> list[Any]:
        commands = [
            {how: name_of(function), "params": {**params, "rank": rank, "ports": self.ports}}
            for rank in range(len(self._members))
        ]
        return self._answers(commands, timeout_s)

    def _answers(self, commands: list[dict[str, Any]], timeout_s: float) -> list[Any]:
        for member, command in zip(self._members, commands, strict=True):
            member.send(command)
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        # One that has failed is heard at once, though the others wait for it.
        while len(answers) < len(self._members):
            for rank, member in enumerate(self._members):
                if rank not in answers and member.has_answer(_LOOK_S):
                    answers[rank] = member.answer(commands[rank], timeout_s)
            if time.monotonic() > deadline:
                late = [r for r in range(len(self._members)) if r not in answers]
                raise ArmError(f"{commands[late[0]]}: ranks {late} gave no answer in {timeout_s} s")
        return [answers[rank] for rank in range(len(self._members))]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in found]
