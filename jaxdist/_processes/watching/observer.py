"""`Observer`: what this process sees of all processes of its job."""

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from jaxdist._processes.process import Process
from jaxdist._processes.store import Store
from jaxdist._processes.watching.stacks import find_thread_in_dump, read_held_stacks

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


# A process that has sent no news for this long is silent. Processes send news once a second.
SILENT_SECONDS = 3.0
LEFT = "jaxdist/left"
LAUNCHER = "JAXDIST_LAUNCHER"
GONE = "its process is gone"
_NAP = 0.1


@dataclasses.dataclass(frozen=True)
class Seen:
    """What this process sees of one process.

    Args:
        state: The last state that it sent; None if it has sent none.
        silent_seconds: How long it has sent no news, by the clock of this process.
        is_stopped: Whether a signal is known to have stopped it.
        ended: Why it has ended; None if it is not known to have ended.
        held: Its stack, if it is on this machine and C code holds its GIL now.
    """

    state: ProcessState | None = None
    silent_seconds: float = 0.0
    is_stopped: bool = False
    ended: str | None = None
    held: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether it is stopped, or has sent no news for `SILENT_SECONDS`."""
        return self.is_stopped or self.silent_seconds >= SILENT_SECONDS


Table = Mapping[int, Seen]


class Observer:
    """Reads the states of all processes, and remembers when each one changed.

    Cost:
        Two requests to the store for each look.

    Args:
        process: This process.
        store: The store of the job.
    """

    def __init__(self, process: Process, store: Store) -> None:
        self._process = process
        self._store = store
        self._lock = threading.Lock()
        self._machine = get_machine()
        now = time.monotonic()
        self._news: dict[int, tuple[int, float]] = dict.fromkeys(range(process.count), (-1, now))

    def look(self) -> Table:
        """Return what is now known of each process."""
        states = {
            state.index: state
            for text in self._store.list(f"{PREFIX}/").values()
            for state in [ProcessState.from_text(text)]
        }
        left = {
            int(key.rpartition("/")[2]): text for key, text in self._store.list(f"{LEFT}/").items()
        }
        now = time.monotonic()
        with self._lock:
            for index, state in states.items():
                if index in self._news and self._news[index][0] != state.news:
                    self._news[index] = (state.news, now)
            changed = {index: when for index, (_, when) in self._news.items()}
        return {
            index: self._see(index, states.get(index), left.get(index), now - changed[index])
            for index in range(self._process.count)
        }

    def look_until_fresh(self, patience: float = SILENT_SECONDS + 0.5) -> Table:
        """Wait until every other process has sent news, and return what is then known.

        Does not wait for processes that have ended or are stopped, and waits at most `patience`
        seconds.
        """
        # The news in this look may be up to a second old.
        self.look()
        with self._lock:
            before = {index: when for index, (_, when) in self._news.items()}
        end = time.monotonic() + patience
        table = self.look()
        while time.monotonic() < end and self._lacks_news(table, before):
            time.sleep(_NAP)
            table = self.look()
        return table

    def _lacks_news(self, table: Table, before: Mapping[int, float]) -> bool:
        with self._lock:
            old = {index for index, (_, when) in self._news.items() if when <= before[index]}
        return any(
            index in old and seen.ended is None and not seen.is_stopped
            for index, seen in table.items()
            if index != self._process.index
        )

    def _see(self, index: int, state: ProcessState | None, left: str | None, silent: float) -> Seen:
        launcher = _read_launchers_note(index)
        letter = self._read_letter(state)
        ended = ", ".join(text for text in (left, launcher) if text) or None
        if ended is None and letter in ("", "Z", "X"):
            ended = GONE
        held = ""
        if state is not None and silent >= SILENT_SECONDS and letter is not None and state.stacks:
            held = find_thread_in_dump(read_held_stacks(state.stacks), state.thread)
        return Seen(state, silent, letter in ("T", "t"), ended, held)

    def _read_letter(self, state: ProcessState | None) -> str | None:
        """Return the state letter of a process; None if it is not on this machine."""
        if state is None or not self._machine or state.machine != self._machine:
            return None
        letter, started = read_process(state.pid)
        # Another process may have its id now.
        return letter if started == state.started else ""


def has_launcher() -> bool:
    """Whether a launcher notes how processes have ended."""
    return os.path.isdir(os.environ.get(LAUNCHER, ""))


def _read_launchers_note(index: int) -> str | None:
    """Return the launcher's note on how a process has ended, such as "signal SIGKILL"."""
    if not has_launcher():
        return None
    try:
        with open(os.path.join(os.environ[LAUNCHER], f"{index}.ended")) as file:
            return file.read().strip() or None
    except OSError:
        return None
