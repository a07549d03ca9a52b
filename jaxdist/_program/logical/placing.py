"""The placement of operations on logical devices, and their grouping into regions."""

# Note [Placed work]
#
# `ASSIGN` marks a value that one logical device of each replica computes (logical_device.py).
# jaxdist places the operation that produces the value on that device, together with all operations
# whose results only placed operations use. Collectives and other marks end the search.
#
# The gradients of a step are in the same program. `ASSIGN` marks the cotangent of a marked value
# too, with `backward=True`. All operations that follow from marked cotangents of one device are
# placed there, until a collective or another mark. So an operation and its transpose run on the
# same device.
#
# `_Placing` (this file) groups placed operations of one device into regions, and regions of
# different devices that do not need each other into one step (`Together`). The fewer steps, the
# fewer collectives: `Rewrite` (rewrite.py) evaluates each as one `PlacedCall` (placed_region.py).
# That is a `shard_map` over the logical devices with a conditional on the device, and an all-reduce
# that sends the results to the other devices.

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.subprograms import open_jaxpr, subprograms
from jaxdist._program.logical.logical_device import ASSIGN, LOGICAL_LAYOUT, get_device
from jaxdist._program.proof.replication import get_named_axes
from jaxdist.errors import ArgumentError

# Never placed, whatever their operands are: they concern all logical devices.
_STAY = frozenset(
    {"sharding_constraint", "shard_map", "jaxdist_all_reduce", "jaxdist_assume_replicated"}
)
_MIXED = -1


@dataclasses.dataclass(frozen=True)
class Region:
    """Operations that one logical device runs as one function."""

    device: int
    eqns: tuple[Any, ...]
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    # For each result, whether only regions of the same device use it.
    is_local: tuple[bool, ...]
    # The mark, or the call, that placed it.
    asked_by: Any
    # Maps the result of each mark to the variable or literal that it marks.
    alias: dict[Any, Any]


@dataclasses.dataclass(frozen=True)
class Together:
    """Regions of different devices that run at the same time, since none needs another."""

    regions: tuple[Region, ...]

    @property
    def invars(self) -> list[Any]:
        """The operands of all regions, concatenated."""
        return [v for r in self.regions for v in r.invars]

    @property
    def outvars(self) -> list[Any]:
        """The results of all regions, concatenated."""
        return [v for r in self.regions for v in r.outvars]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A program as operations and `Together` steps, in an order in which they can run.

    `alias` maps the result of each mark to the variable or literal that it marks.
    """

    steps: tuple[Any, ...]
    alias: dict[Any, Any]

    @property
    def regions(self) -> list[Region]:
        """The regions among the steps."""
        return [r for s in self.steps if isinstance(s, Together) for r in s.regions]


def is_marked(eqn: Any) -> bool:
    """Whether an operation is a mark of `assigned`, or was placed by `on_device`."""
    return eqn.primitive is ASSIGN or get_device(eqn) is not None


def find_obstacle(eqn: Any) -> Any | None:
    """Return the operation, `eqn` or one inside it, that cannot run on one logical device alone."""
    stays = eqn.primitive.name in _STAY or eqn.primitive in (ASSIGN, LOGICAL_LAYOUT)
    if stays or (eqn.primitive.name in known.COLLECTIVES and get_named_axes(eqn.params)):
        return eqn
    for program in subprograms(eqn):
        for inner in open_jaxpr(program).eqns:
            found = find_obstacle(inner)
            if found is not None:
                return found
    return eqn if eqn.effects else None


def make_schedule(jaxpr: Any, *, backward: bool = False) -> Schedule:
    """Place the operations of an open jaxpr; see Note [Placed work].

    Args:
        jaxpr: The program; programs inside its operations are placed separately.
        backward: Whether the whole program belongs to a gradient.
    """
    return _Placing(jaxpr, backward).schedule()


class _Placing:
    def __init__(self, jaxpr: Any, backward: bool) -> None:
        self.jaxpr = jaxpr
        self.backward = backward
        self.eqns = list(jaxpr.eqns)
        self.users: dict[Any, list[int]] = defaultdict(list)
        for i, eqn in enumerate(self.eqns):
            for v in _iterate_variables(eqn.invars):
                self.users[v].append(i)
        self.results = set(_iterate_variables(jaxpr.outvars))
        # The operations other than marks, and the variable or literal that each mark marks.
        self.order = [i for i, e in enumerate(self.eqns) if e.primitive is not ASSIGN]
        self.alias: dict[Any, Any] = {}
        for eqn in self.eqns:
            if eqn.primitive is ASSIGN:
                [given], [marked] = eqn.invars, eqn.outvars
                is_literal = isinstance(given, Literal)
                self.alias[marked] = given if is_literal else self.alias.get(given, given)
        self.device: dict[int, int] = {}
        self.asked_by: dict[int, Any] = {}

    def schedule(self) -> Schedule:
        self._place_named()
        self._place_cotangents()
        self._place_backwards()
        return Schedule(tuple(self._group()), self.alias)

    # The device of each operation

    def _place_named(self) -> None:
        for i, eqn in enumerate(self.eqns):
            device = get_device(eqn)
            if device is not None and any(open_jaxpr(p).eqns for p in subprograms(eqn)):
                self.device[i] = device

    def _place_cotangents(self) -> None:
        """Place the operations that follow from marked cotangents of one device."""
        label: dict[Any, int] = {}
        marked: dict[int, Any] = {}
        for i, eqn in enumerate(self.eqns):
            if eqn.primitive is ASSIGN:
                if eqn.params["backward"]:
                    label[eqn.outvars[0]] = eqn.params["device"]
                    marked.setdefault(eqn.params["device"], eqn)
                continue
            # Only operations of the gradient: an optimizer's update reads the cotangents too, and
            # must not be placed.
            found = {label[v] for v in _iterate_variables(eqn.invars) if v in label}
            if not found or i in self.device or not (self.backward or _compat.is_transposed(eqn)):
                continue
            alone = len(found) == 1 and _MIXED not in found and find_obstacle(eqn) is None
            device = found.pop() if alone else _MIXED
            label.update(dict.fromkeys(eqn.outvars, device))
            if alone:
                self.device[i] = device
                self.asked_by[i] = marked[device]

    def _place_backwards(self) -> None:
        """Place the operations that only marked values, or placed operations, depend on."""
        for i in reversed(self.order):
            eqn = self.eqns[i]
            if i in self.device:
                continue
            marks = [m for v in eqn.outvars for m in self._find_marks_on(v)]
            if marks:
                device, mark = _get_device_of_marks(marks), marks[0]
            else:
                found = self._find_device_of_users(eqn)
                if found is None:
                    continue
                device, mark = found
            if find_obstacle(eqn) is None:
                self.device[i], self.asked_by[i] = device, mark

    def _find_marks_on(self, variable: Any) -> list[Any]:
        """Return the marks on a value, and the marks on these marked values."""
        found: list[Any] = []
        for user in self.users[variable]:
            eqn = self.eqns[user]
            if eqn.primitive is ASSIGN and not eqn.params["backward"]:
                found += [eqn, *self._find_marks_on(eqn.outvars[0])]
        return found

    def _find_device_of_users(self, eqn: Any) -> tuple[int, Any] | None:
        if any(v in self.results for v in eqn.outvars):
            return None
        users = {u for v in eqn.outvars for u in self.users[v]}
        named = any(get_device(self.eqns[u]) is not None for u in users)
        devices = {self.device.get(u) for u in users}
        if named or len(devices) != 1 or None in devices:
            return None
        first = min(users)
        [device] = (d for d in devices if d is not None)
        return device, self.asked_by[first]

    # The regions: operations of one device with no other operation between them

    def _group(self) -> list[Any]:
        depth = self._find_depths()
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        steps: list[tuple[int, int, Any]] = []
        for i in self.order:
            if i in self.device:
                groups[self.device[i], depth[i]].append(i)
            else:
                steps.append((depth[i], i, self.eqns[i]))
        used = self._find_users()
        levels: dict[int, list[tuple[int, Region]]] = defaultdict(list)
        for (device, level), members in groups.items():
            levels[level].append((members[0], self._make_region(device, members, used)))
        for level, regions in levels.items():
            first = min(number for number, _ in regions)
            together = sorted((r for _, r in regions), key=lambda r: r.device)
            steps.append((level, first, Together(tuple(together))))
        return [step for _, _, step in sorted(steps, key=lambda s: s[:2])]

    def _find_depths(self) -> dict[int, int]:
        """Return for each operation the largest number of changes of device on a path to it.

        Two operations with the same device and depth have no operation of other devices between
        them, so they can be in one region.
        """
        before: dict[int, set[int]] = {}
        made_by: dict[Any, int] = {}
        with_effects: int | None = None
        for i in self.order:
            eqn = self.eqns[i]
            needs = {made_by[v] for v in self._list_read(eqn.invars) if v in made_by}
            # Operations with effects keep their order.
            if eqn.effects:
                needs |= set() if with_effects is None else {with_effects}
                with_effects = i
            before[i] = needs
            made_by.update(dict.fromkeys(eqn.outvars, i))
        where = self.device.get
        depth: dict[int, int] = {}
        for i in self.order:
            depth[i] = max((depth[j] + (where(j) != where(i)) for j in before[i]), default=0)
        # An operation may wait for later ones of its device. Delaying it gives fewer, larger
        # regions.
        latest = self._find_latest_depths(before, depth)
        for device in set(self.device.values()):
            members = [i for i in self.order if where(i) == device]
            levels = _find_fewest_levels([(depth[i], latest[i]) for i in members])
            for i in members:
                depth[i] = next(level for level in levels if level >= depth[i])
        return depth

    def _find_latest_depths(
        self, before: dict[int, set[int]], depth: dict[int, int]
    ) -> dict[int, float]:
        """Return for each operation the largest depth at which it does not delay another device."""
        latest: dict[int, float] = dict.fromkeys(self.order, math.inf)
        for i in reversed(self.order):
            for j in before[i]:
                together = i in self.device and self.device.get(j) == self.device[i]
                latest[j] = min(latest[j], latest[i] if together else depth[i] - 1)
        return latest

    def _list_read(self, atoms: Iterable[Any]) -> list[Any]:
        """Return the variables among the atoms, each result of a mark as the value it marks."""
        return list(_iterate_variables(self.alias.get(v, v) for v in _iterate_variables(atoms)))

    def _find_users(self) -> dict[Any, set[int]]:
        used: dict[Any, set[int]] = defaultdict(set)
        for i in self.order:
            for v in self._list_read(self.eqns[i].invars):
                used[v].add(i)
        for v in self._list_read(self.results):
            used[v].add(-1)
        return used

    def _make_region(self, device: int, members: list[int], used: dict[Any, set[int]]) -> Region:
        inside = set(members)
        eqns = tuple(self.eqns[i] for i in members)
        made = [v for e in eqns for v in e.outvars]
        own = set(made)
        reads = (v for e in eqns for v in self._list_read(e.invars) if v not in own)
        outvars = tuple(v for v in made if used[v] - inside)
        is_local = tuple(
            all(self.device.get(u) == device for u in used[v] - inside) for v in outvars
        )
        asked_by = next((self.asked_by[i] for i in members if i in self.asked_by), eqns[0])
        invars = tuple(dict.fromkeys(reads))
        return Region(device, eqns, invars, outvars, is_local, asked_by, self.alias)


def _get_device_of_marks(marks: Sequence[Any]) -> int:
    """Return the device of all marks on a value.

    Raises:
        ArgumentError: The marks are of different devices.
    """
    first: int = marks[0].params["device"]
    for mark in marks:
        if mark.params["device"] != first:
            raise ArgumentError(
                f"A value is assigned to logical device {first}, at "
                f"{_compat.find_source(marks[0])}, and to logical device {mark.params['device']}, "
                f"at {_compat.find_source(mark)}.\n\n"
                "One logical device of each replica computes a value; the others get it when they "
                "use it.\n\n"
                "Leave one of the two calls out, or assign what is computed from the value."
            )
    return first


def _find_fewest_levels(ranges: Sequence[tuple[int, float]]) -> list[int]:
    """Return the fewest numbers such that each range contains at least one of them."""
    # Greedy by the ends of the ranges, which is optimal.
    levels: list[int] = []
    for first, last in sorted(ranges, key=lambda r: r[1]):
        if not levels or levels[-1] < first:
            forever = [f for f, _ in ranges]
            levels.append(max(forever) if math.isinf(last) else int(last))
    return levels


def _iterate_variables(atoms: Any) -> Any:
    return (a for a in atoms if not isinstance(a, Literal))
