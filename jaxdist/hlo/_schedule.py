"""Predicts the time of a scheduled program, from the operations that wait for each other.

# Note [What a schedule overlaps]
XLA writes the instructions of a compiled program in the order in which a device starts them. One
instruction computes at a time. A synchronous collective stops the computation. An asynchronous one
runs from its start, beside the instructions up to its done, and the done waits for its end. The
compiler for TPUs writes some of these as fusions (`AsyncCollectiveStart`, `AsyncCollectiveDone`),
and those between slices as a send and a recv. Copies between memories also run beside the
computation. Work that a GPU starts on a second stream (`fusion-start`, `call-start`) does not: all
streams share the same memory and cores, so it counts where it starts. A link carries one collective
at a time, in the order of their starts. The body of a loop begins and ends with idle links. So
overlap is read from the schedule, not assumed.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping

from jaxdist.hlo import _text
from jaxdist.hlo._collectives import CompiledCollective, find_collectives
from jaxdist.hlo._known import runs_on_other_core
from jaxdist.hlo._text import Instruction, find_part
from jaxdist.hlo._traffic import find_fused
from jaxdist.hlo._trips import count_trips
from jaxdist.hlo._work import Counter, Work

# Returns the name of the link of a collective, and its seconds.
TimeCollective = Callable[[CompiledCollective], tuple[str, float]]

_CHANNEL = re.compile(r"channel_id=(\d+)")
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_START, _DONE = '"AsyncCollectiveStart"', '"AsyncCollectiveDone"'
_MEMORY = "HBM"
# Operations that compute even if they have a start and a done.
_COMPUTING = frozenset({"fusion", "custom-call"})


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Seconds of a program on one device.

    Attributes:
        work: Seconds in which it computes.
        waits: For each link, seconds in which the device waits for it and computes nothing.
        busy: Seconds in which each link carries collectives.
    """

    work: float
    waits: Mapping[str, float]
    busy: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The time of the program."""
        return self.work + sum(self.waits.values())


def schedule(
    text: str, time_collective: TimeCollective, time_work: Callable[[Work], float]
) -> Schedule:
    """Return the predicted time of a compiled program that hides some of its communication.

    See Note [What a schedule overlaps].

    Args:
        text: The result of `jax.stages.Compiled.as_text`, for a scheduled program.
        time_collective: Returns the link and the seconds of a collective.
        time_work: Returns the seconds of the work of one instruction.

    Example:
        >>> from jaxdist import hlo
        >>> text = jax.jit(jnp.dot).lower(jnp.ones((4, 8)), jnp.ones((8, 2))).compile().as_text()
        >>> hlo.schedule(text, lambda c: ("link", 0.0), lambda work: work.flops / 128).work
        1.0
    """
    module = _text.read(text)
    found = find_collectives(module)
    times = {key: time_collective(c) for key, c in found.items()}
    made = _Run(module, times, time_work).computation(module.entry)
    return Schedule(made.work, dict(made.waits), dict(made.busy))


_make_sums = functools.partial(collections.defaultdict[str, float], float)


@dataclasses.dataclass
class _Clock:
    """The time within one computation, and how it was spent."""

    now: float = 0.0
    work: float = 0.0
    free: dict[str, float] = dataclasses.field(default_factory=dict)  # of each link
    ends: dict[str, tuple[str, float]] = dataclasses.field(default_factory=dict)  # by channel
    waits: dict[str, float] = dataclasses.field(default_factory=_make_sums)
    busy: dict[str, float] = dataclasses.field(default_factory=_make_sums)

    def start(self, key: str, link: str, seconds: float) -> None:
        end = max(self.now, self.free.get(link, 0.0)) + seconds
        self.free[link], self.ends[key] = end, (link, end)
        self.busy[link] += seconds

    def wait(self, key: str) -> None:
        link, end = self.ends.pop(key, ("", 0.0))
        if end > self.now:
            self.waits[link] += end - self.now
            self.now = end

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.work += seconds

    def add(self, other: "_Clock", times: float) -> None:
        """Add computations that run one after the other."""
        self.now += other.now * times
        self.work += other.work * times
        for mine, theirs in ((self.waits, other.waits), (self.busy, other.busy)):
            for link, seconds in theirs.items():
                mine[link] += seconds * times


class _Run:
    """A run of a module, computation by computation."""

    def __init__(
        self,
        module: _text.Module,
        times: Mapping[tuple[str, str], tuple[str, float]],
        time_work: Callable[[Work], float],
    ) -> None:
        self._module, self._times, self._time_work = module, times, time_work
        self._count = Counter(module).instruction
        self._known: dict[str, _Clock] = {}

    def computation(self, name: str) -> _Clock:
        """Return the time of one run of a computation."""
        if name not in self._known:
            self._known[name] = _Clock()  # ends the recursion if a computation calls itself
            clock, within = _Clock(), self._module.computations.get(name, {})
            for i in within.values():
                self._instruction(clock, name, within, i)
            for key in tuple(clock.ends):
                clock.wait(key)
            self._known[name] = clock
        return self._known[name]

    def _instruction(
        self, clock: _Clock, name: str, within: dict[str, Instruction], i: Instruction
    ) -> None:
        operation = _text.resolve_start(i)
        if i.opcode == "while":
            turns = count_trips(self._module, within, i)
            for how, called in i.called:
                count = 1 if turns is None else turns
                clock.add(self.computation(called), count + (how == "condition"))
            return
        if operation.opcode in ("call", "conditional"):
            inner = [self.computation(called) for _, called in i.called]
            if inner:
                # As for the work, count one branch: the longest.
                clock.add(max(inner, key=lambda c: c.now), float(find_part(operation)))
            return
        called = find_fused(i) if i.opcode == "fusion" else ""
        inside = self._module.computations.get(called, {})
        if inside and any(_DONE in j.rest for j in inside.values()):
            clock.wait(_find_channel(inside))
            return
        if i.opcode.endswith("-done"):
            self._finish(clock, within, i)
            return
        own = self._times.get((name, i.name))
        fused = [self._times[called, n] for n in inside if (called, n) in self._times]
        if inside and any(_START in j.rest for j in inside.values()):
            for link, seconds in fused:
                clock.start(_find_channel(inside), link, seconds)
            return
        for link, seconds in fused:
            # A fusion without a start, such as a reduce-scatter of TPUs, stops the device.
            clock.start(i.name, link, seconds)
            clock.wait(i.name)
        if own is not None:
            is_async = i.opcode.endswith("-start") or i.opcode == "send"
            meeting = _MEETING.search(i.rest)
            key = meeting[1] if meeting else i.name
            clock.start(key, *own)
            if not is_async:
                clock.wait(key)
            return
        work = self._count(within, operation)
        is_beside = operation.opcode not in _COMPUTING or runs_on_other_core(operation)
        if i.opcode.endswith("-start") and is_beside:
            # A copy between memories, or other work beside the computation.
            clock.start(i.name, _MEMORY, self._time_work(work))
            return
        if i.opcode not in ("send", "recv"):
            clock.compute(self._time_work(work))

    def _finish(self, clock: _Clock, within: dict[str, Instruction], i: Instruction) -> None:
        """Wait for the operation that a done ends."""
        start = within.get(i.operands[0]) if i.operands else None
        # Updates come between a start and its done.
        while start is not None and start.opcode.endswith("-update"):
            start = within.get(start.operands[0])
        if start is None:
            return
        meeting = _MEETING.search(start.rest)
        if i.opcode != "send-done":
            clock.wait(meeting[1] if meeting else start.name)


def _find_channel(inside: Mapping[str, Instruction]) -> str:
    """Return the channel of the collective that a fusion starts or ends."""
    found = (_CHANNEL.search(j.rest) for j in inside.values())
    return next((f"channel {channel[1]}" for channel in found if channel), "")
