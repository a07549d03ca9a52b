"""Compares the plain arguments of a step between processes.

# Note [Compared arguments]
A plain array is mirrored: each process copies its own to its devices. If they differ, replicas
compute with different values, and the proof of equal results is wrong without an error. So the
first call of each program compares all plain arguments, and state that each process has made for
itself becomes that of process 0. Of the later calls, those whose number is a power of two or a
multiple of 64 are compared: each process keeps their digests, which are compared once a second.
Strategies count their calls separately, so each strategy has its own keys, which contain a number
that all processes give it at its first comparison.
"""

import json
import time
import zlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.tree_util import keystr

from jaxdist import _processes
from jaxdist._called import called, name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.run.call import Call, LeafName
from jaxdist._values import (
    MOST_BYTES,
    digest,
    is_of_this_process,
    is_per_replica,
    make_equal,
)
from jaxdist.errors import ProgramMismatchError

_EVERY = 64
_KEPT = 16
_SECONDS_BETWEEN_LOOKS = 1.0


@called(lambda name: f"strategy.run({name})")
def make_arguments_equal(name: str, call: Call, layout: ReplicaMesh, seconds: float | None) -> None:
    """Compare the plain leaves of the first call of a program; state becomes that of process 0.

    Raises:
        ProgramMismatchError: NumPy arrays or numbers differ.
    """
    if not layout.is_shared:
        return
    graph = call.cached_graph
    offset = len(call.leaves) - len(call.flat.dynamic)
    named: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    for i, leaf in enumerate(call.leaves):
        if is_of_this_process(leaf):
            path = str(LeafName(call.flat, graph, offset, i))
            named[path], numbers[path] = leaf, i
    equal = make_equal(named, layout, seconds)
    for path, value in equal.items():
        call.leaves[numbers[path]] = value
        call.moved = True
    if graph is not None and equal:
        # A step may only read some variables, and later calls read them again.
        graph.write(call.leaves[:offset])


class LaterCalls:
    """Compares plain arguments of later calls of all steps of one strategy."""

    def __init__(self) -> None:
        self._count = 0
        self._order = 0
        self._kept: dict[str, dict[str, str]] = {}
        self._next_look = 0.0
        self._folder = ""

    def add(self, name: str, args: Any, kwargs: Any, layout: ReplicaMesh) -> None:
        """Note a call, and compare the last ones if it is time.

        Raises:
            ProgramMismatchError: An argument of an earlier call differed.
        """
        if not self._folder:
            agreement = _processes.get_agreement()
            which = 0 if agreement is None else agreement.count("strategies")
            self._folder = f"jaxdist/arguments/{which}/"
        self._count += 1
        number = self._count
        self.note(name)
        if number & (number - 1) and number % _EVERY:
            return
        order = {"the order of calls until then": str(self._order)}
        self._kept[str(number)] = order | _digest_plain(name, args, kwargs)
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        self._look(layout)

    def note(self, name: str) -> None:
        """Note a call, so that the order of all calls is compared."""
        self._order = zlib.crc32(name.encode(), self._order)

    def _look(self, layout: ReplicaMesh) -> None:
        store = _processes.get_store()
        if store is None:
            return
        me = layout.process.index
        store.set(f"{self._folder}{me}", json.dumps(self._kept), overwrite=True)
        for key, text in store.list(self._folder).items():
            other = int(key.rpartition("/")[2])
            if other != me:
                self._compare(other, me, json.loads(text))

    @called("strategy.run")
    def _compare(self, other: int, me: int, theirs: Mapping[str, Mapping[str, str]]) -> None:
        for number, own in self._kept.items():
            there = theirs.get(number)
            if there is None or there == own:
                continue
            names = [n for n in {**own, **there} if own.get(n) != there.get(n)]
            # With two processes nobody knows who is wrong: the lower number counts as right.
            odd = max(other, me)
            _processes.tell_blame([odd])
            raise ProgramMismatchError(
                f"{name_call()}: {names[0]} of call {number} was different in process {odd}.\n\n"
                "A plain array or number is the same for every replica, so it must be equal in all "
                "processes. Results computed since then may be wrong.\n\n"
                "Pass the part of each replica as a distributed value, or the same value in all "
                "processes, and restore an earlier checkpoint.",
                [odd],
            )


def _digest_plain(name: str, args: Any, kwargs: Any) -> dict[str, str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_per_replica)
    found = {f"the step {name}": ""}
    for path, leaf in leaves:
        # Results of steps are on all devices, and not of this process.
        if is_of_this_process(leaf):
            found[f"args{keystr(path[1:])} of {name}"] = digest(leaf, MOST_BYTES)
    return found
