"""`ProcessState`: what a process reports to the others about itself once a second."""

import dataclasses
import json
import os
import socket
from typing import Any

PREFIX = "jaxdist/here"


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """What a process is doing.

    Args:
        index: Number of the process.
        news: Number of this message. Readers check whether it changes, so they need not compare
            clocks of different machines.
        place: What it does, such as "reduce (call 3)".
        line: Source line, such as "train.py:31 (main)".
        step: Number of the step, if one is known.
        seconds: How long it has been in this place.
        in_wait: Whether it waits for other processes.
        stack: Python stack, if it has been in this place for some time.
        blames: Processes that its last error named; None if it had none.
        raised: Description of an exception in one of its threads.
        held: The stack from an earlier time when C code held the GIL.
        host: Name of its machine.
        machine: Equal only for processes whose ids have the same meaning; see `get_machine`.
        pid: Its process id.
        started: When the process began, by the clock of its machine.
        thread: Identifier of the thread that runs the steps.
        stacks: Path of the stacks that it writes while C code holds the GIL.
    """

    index: int
    news: int = 0
    place: str = ""
    line: str = ""
    step: int | None = None
    seconds: float = 0.0
    in_wait: bool = False
    stack: str = ""
    blames: tuple[int, ...] | None = None
    raised: str = ""
    held: str = ""
    host: str = ""
    machine: str = ""
    pid: int = 0
    started: str = ""
    thread: int = 0
    stacks: str = ""

    def to_text(self) -> str:
        """Return the state as JSON."""
        # Leave out fields with their default value: the string is sent every second.
        named = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return json.dumps(named)

    @classmethod
    def from_text(cls, text: str) -> "ProcessState":
        """Return the state that `to_text` wrote."""
        named: dict[str, Any] = json.loads(text)
        if named.get("blames") is not None:
            named["blames"] = tuple(named["blames"])
        return cls(**named)


def describe_this_machine() -> dict[str, Any]:
    """Return the fields of a state that stay the same while the process lives."""
    return {
        "host": socket.gethostname(),
        "machine": get_machine(),
        "pid": os.getpid(),
        "started": read_process(os.getpid())[1],
    }


def get_machine() -> str:
    """Return a string that is equal only for processes that share their process ids.

    Containers may have the same host name but different process ids. "" if unknown.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def read_process(pid: int) -> tuple[str, str]:
    """Return the state letter of a process (T: stopped, Z: ended) and when it began.

    Both are "" for a process that does not exist.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name of the program, in parentheses, may contain any character.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
