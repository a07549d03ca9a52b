"""`diagnose`: finds which process is behind, from what one process sees of all.

Note [Behind]
~~~~~~~~~~~~~
In a synchronous job all processes show the same step, so the step does not tell who is behind. The
first of these rules that finds a process counts:

1. a process that has ended, unless it ended because of others;
2. a process that a signal has stopped;
3. a process that is outside the collective, unless it left the collective because of others;
4. a silent process: its last news may be older than the hang;
5. a process that waits in the collective of an earlier step, or an earlier call, than others;
6. a process that the error of another process named;
7. a process that ended because of others.

The process that runs the diagnosis is never named: it waits.
"""

import dataclasses
import re
from collections.abc import Iterable

from jaxdist._processes.watching.observer import Seen, Table
from jaxdist._processes.watching.stacks import find_line_in_dump


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Which processes the others wait for.

    Args:
        behind: Their numbers; empty if unknown.
        text: A report. Its first line names these processes and no other.
        have_ended: Whether they have ended, so that waiting does not help.
    """

    behind: tuple[int, ...]
    text: str
    have_ended: bool = False


def diagnose(table: Table, own: int) -> Diagnosis:
    """Return which processes are behind. See Note [Behind].

    Args:
        table: What the process `own` sees of each process.
        own: The process that waits.
    """
    others = {index: seen for index, seen in table.items() if index != own}
    ended = [i for i, seen in others.items() if seen.ended is not None]
    roots = [i for i in ended if not _follows(others[i])]
    alive = {i: seen for i, seen in others.items() if seen.ended is None}
    found = (
        roots
        or [i for i, seen in alive.items() if seen.is_stopped]
        or [i for i, seen in alive.items() if _is_outside(seen)]
        or [i for i, seen in alive.items() if seen.is_silent]
        or _find_earlier(table, own)
        or _find_blamed(table, own)
        or ended
    )
    behind = tuple(sorted(found))
    have_ended = bool(behind) and all(table[i].ended is not None for i in behind)
    return Diagnosis(behind, _write(table, behind, own), have_ended)


def diagnose_lost(table: Table, own: int) -> Diagnosis:
    """Return which process made a collective fail by closing its connection.

    A process that is alive and sends news may be outside the collective only because its own
    collective failed earlier. So no process is named for being outside.

    Args:
        table: What the process `own` sees of each process.
        own: The process whose collective has failed.
    """
    others = {index: seen for index, seen in table.items() if index != own}
    ended = [i for i, seen in others.items() if seen.ended is not None]
    roots = [i for i in ended if not _follows(others[i])]
    blamed = _find_blamed(table, own)
    silent = [i for i, seen in others.items() if seen.ended is None and seen.is_silent]
    behind = tuple(sorted(roots or blamed or silent))
    text = _write(table, behind, own)
    if not behind and any(own in (s.state.blames or ()) for s in others.values() if s.state):
        text = f"The other processes have stopped waiting for this one.\n\n{text}"
    # A silent process whose connection has closed, and that is not stopped, has ended.
    are_gone = all(table[i].ended is not None or not table[i].is_stopped for i in silent)
    have_ended = all(table[i].ended is not None for i in behind) or (
        behind == (*silent,) and are_gone
    )
    return Diagnosis(behind, text, bool(behind) and have_ended)


def name_processes(indices: Iterable[int]) -> str:
    """Return "process 1", or "process 1, process 2 and process 4"."""
    *most, last = [f"process {i}" for i in indices]
    return f"{', '.join(most)} and {last}" if most else last


def _follows(seen: Seen) -> bool:
    return seen.state is not None and seen.state.blames is not None


def _is_outside(seen: Seen) -> bool:
    return seen.state is not None and not seen.state.in_wait and not _follows(seen)


def _find_earlier(table: Table, own: int) -> list[int]:
    """Find the processes with the lowest step, or the lowest number of a call of the same kind."""
    waiting = {
        i: seen.state
        for i, seen in table.items()
        if seen.state is not None and seen.state.in_wait and seen.ended is None
    }
    steps = {i: state.step for i, state in waiting.items() if state.step is not None}
    calls = {i: m for i, state in waiting.items() if (m := _CALL.fullmatch(state.place))}
    numbers = [{i: step for i, step in steps.items() if step is not None}]
    if len({m[1] for m in calls.values()}) == 1:
        numbers.append({i: int(m[2]) for i, m in calls.items()})
    for by_process in numbers:
        # Only if all waiting processes can be compared.
        if by_process.keys() == waiting.keys() and len({*by_process.values()}) > 1:
            least = min(by_process.values())
            return [i for i, number in by_process.items() if number == least and i != own]
    return []


_CALL = re.compile(r"(.*) \(call (\d+)\)")


def _find_blamed(table: Table, own: int) -> list[int]:
    blamed = {i for seen in table.values() if seen.state for i in seen.state.blames or ()}
    return [i for i in blamed if i in table and i != own]


def _write(table: Table, behind: tuple[int, ...], own: int) -> str:
    others = [i for i in table if i not in behind]
    rest = "\n".join(_describe(i, table[i], own) for i in sorted(others))
    if not behind:
        head = "No process is known to be behind: all wait for each other."
        return f"{head}\n\n{rest}"
    if len(behind) == 1:
        head = f"process {behind[0]} {_summarize(table[behind[0]])}."
    else:
        verb = "have ended" if all(table[i].ended is not None for i in behind) else "are behind"
        head = f"{name_processes(behind)} {verb}."
    details = "\n".join(_describe(i, table[i], own) + _quote_stack(table[i]) for i in behind)
    return f"{head}\n\n{details}\n\nThe other processes:\n{rest}"


def _summarize(seen: Seen) -> str:
    """Return the rest of a first line, after the process's name; it names no other process."""
    where = f" on {seen.state.host}" if seen.state is not None and seen.state.host else ""
    if seen.ended is not None:
        return f"has ended{where} ({_in_one_line(seen.ended)})"
    return f"is behind{where}: it is {_in_one_line(_say_where(seen))}"


def _in_one_line(text: str) -> str:
    # The string comes from another program, and may itself name processes.
    line = text.strip().splitlines()[0] if text.strip() else ""
    return re.sub(r"(?i)process(?= \d)", "task", line)


def _say_where(seen: Seen) -> str:
    if seen.state is None:
        seconds = f"{seen.silent_seconds:.0f} s"
        return f"silent: it has sent no news in the {seconds} since this process began to watch it"
    state = seen.state
    line = find_line_in_dump(seen.held) or state.line
    parts = [f"at {line}" if line else state.place]
    if not state.in_wait:
        parts.append("not inside the collective")
    if state.step is not None:
        parts.append(f"step {state.step}")
    parts.append(f"for {state.seconds + seen.silent_seconds:.0f} s")
    if seen.is_stopped:
        parts.append("and stopped by a signal (SIGSTOP)")
    elif seen.is_silent:
        held = ", C code holds its GIL" if seen.held else ""
        parts.append(f"and silent for {seen.silent_seconds:.0f} s{held}")
    return ", ".join(parts)


def _describe(index: int, seen: Seen, own: int) -> str:
    state = seen.state
    whose = f"process {index}" + (", which reports this" if index == own else "")
    if state is not None:
        whose += f" (host {state.host}, pid {state.pid})"
    if seen.ended is not None:
        return f"{whose} has ended: {seen.ended}"
    text = f"{whose} is {_say_where(seen)}"
    if state is not None:
        text += f", in {state.place}" if state.in_wait or state.place else ""
        text += f"; a thread has raised {state.raised}" if state.raised else ""
        if state.blames:
            text += f"; it has left its collective because of {name_processes(state.blames)}"
    return text


def _quote_stack(seen: Seen) -> str:
    state = seen.state
    if seen.held:
        return _quote("Its stack, while C code holds the GIL (most recent call first):", seen.held)
    if state is None:
        return ""
    if seen.is_silent:
        last = "Its stack, when it last sent news (most recent call last):"
        return _quote(last, state.stack) if state.stack else "\n  Its stack is not known."
    text = _quote("Its stack (most recent call last):", state.stack) if state.stack else ""
    if state.held:
        text += _quote("Before, C code held its GIL (most recent call first):", state.held)
    return text


def _quote(title: str, stack: str) -> str:
    lines = "".join(f"\n    {line}" for line in stack.rstrip().splitlines())
    return f"\n  {title}{lines}"
