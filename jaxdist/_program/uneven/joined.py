"""Several traces of one step, for replicas with different shapes, joined into one program."""

# Note [Joined traces]
#
# Replicas with equal local shapes form a group, and jaxdist traces the step once for each group
# (uneven.py). XLA runs one program on all devices, so `_Join` evaluates the traces together:
#
# - Operations that are equal in all traces, on the same values, run once, on all replicas. Of a
#   call, a loop or a branch with several results, each result is judged alone (`split_by_results`).
# - The other operations go into the branches of a `jax.lax.switch` over the group of the replica.
# - Collectives run between these switches, where all replicas meet: a replica in another branch
#   would never reach a collective in this one.
#
# A switch needs results of one shape, so a value whose shape differs between groups is padded to
# the largest shape when it leaves a switch, and sliced when it enters the next (`Slot`). A loop
# with a collective in it becomes one loop, whose bodies are joined in the same way
# (joined_loops.py). Errors about groups that diverge are in divergence.py.

import difflib
import functools
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._collectives import UNEVEN_ALL_GATHER, gather_padded
from jaxdist._program.jaxprs.subprograms import open_jaxpr
from jaxdist._program.uneven.divergence import (
    check_same_collective,
    check_same_gather,
    check_same_loop,
    check_same_shapes,
)
from jaxdist._program.uneven.joined_loops import LOOPS, list_constants
from jaxdist._program.uneven.joined_ops import (
    Const,
    Groups,
    Key,
    Op,
    Slot,
    abstract,
    dtype_of,
    flatten_ops,
    is_equal,
    is_same,
    list_shapes,
    pad_to_largest,
    slice_to,
    split_by_results,
)

# Their rules for derivatives have been applied, and JAX cannot compute some of their results alone.
_INLINED = frozenset({"custom_jvp_call", "custom_vjp_call"})


def run_joined(
    programs: Sequence[Any], arguments: Sequence[Sequence[Slot | Const]], groups: Groups
) -> list[Slot]:
    """Evaluate one program for each group, joined; see Note [Joined traces].

    Args:
        programs: One for each group; their results may differ in shape.
        arguments: The inputs of each program. A value that all groups share is one slot.
        groups: The group of each replica.

    Raises:
        ShapeError: The operands of a collective have different shapes.
        DivergentCollectiveError: The programs do not have the same collectives.
    """
    return _Join(programs, arguments, groups).run()


class _Join:
    """One evaluation.

    For each group `g`, `env[g]` has the values that are computed, `pending[g]` the operations that
    wait for the next switch, and `done[g]` is how many operations are computed or pending.
    """

    def __init__(
        self, programs: Sequence[Any], arguments: Sequence[Sequence[Slot | Const]], groups: Groups
    ) -> None:
        self.groups = groups
        self.env: list[dict[Any, Slot]] = []
        self.ops: list[list[Op]] = []
        self.results: list[list[Any]] = []
        for program, given in zip(programs, arguments, strict=True):
            variables = open_jaxpr(program).invars
            atoms = [
                a if isinstance(a, Const) else Key(v.aval)
                for a, v in zip(given, variables, strict=True)
            ]
            ops, results = flatten_ops(program, atoms, _INLINED)
            pairs = zip(atoms, given, strict=True)
            self.env.append({k: s for k, s in pairs if isinstance(s, Slot)})
            self.ops.append(ops)
            self.results.append(results)
        self.pending: list[list[Op]] = [[] for _ in programs]
        self.done = [0] * len(programs)

    def run(self) -> list[Slot]:
        collectives = [[i for i, op in enumerate(ops) if op.has_collective] for ops in self.ops]
        for row in zip_longest(*collectives):
            ops = check_same_collective(self.ops, row, self.groups)
            self._process_region(row)
            if ops[0].name in LOOPS:
                check_same_loop(ops, self.groups)
            columns, own = self._match_operands(ops)
            slots = self._get_slots(columns)
            for g, i in enumerate(row):
                self.done[g] = i + 1
            outputs = self._communicate(ops, slots, [[slots[c] for c in row] for row in own])
            for g, op in enumerate(ops):
                self.env[g].update(zip(op.outputs, outputs, strict=True))
        self._process_region([len(ops) for ops in self.ops])
        results = self._get_slots(list(zip(*self.results, strict=True)))
        # Nobody reads the results of a debug.print, but it must still run.
        if any(_compat.has_side_effects(op.eqn) for pending in self.pending for op in pending):
            self._run_switch([])
        return results

    def _match_operands(self, ops: list[Op]) -> tuple[list[tuple[Any, ...]], list[list[int]]]:
        """Match the operands of one operation in all groups.

        The constants of loops may differ in number and kind between groups. A constant that is one
        value in all groups gets a column. The others share columns by dtype and rank, with None for
        groups that have fewer of them.

        Returns:
            The columns, each with an operand for each group, and for each group the column of each
            of its operands.
        """
        parts = [list(list_constants(op)) for op in ops]
        own: list[list[int]] = [[0] * len(op.inputs) for op in ops]
        columns: list[tuple[Any, ...]] = []

        def enter(places: Sequence[int | None]) -> None:
            for g, place in enumerate(places):
                if place is not None:
                    own[g][place] = len(columns)
            pairs = zip(ops, places, strict=True)
            columns.append(tuple(None if i is None else op.inputs[i] for op, i in pairs))

        # Operands that are not constants of a loop correspond by position.
        others = [
            [i for i in range(len(op.inputs)) if i not in part]
            for op, part in zip(ops, map(set, parts), strict=True)
        ]
        for row in zip(*others, strict=True):
            enter(row)
        by_kind: dict[Any, list[list[int]]] = {}
        for places in self._match_constants(ops, parts):
            enter(places)
            for part, place in zip(parts, places, strict=True):
                part.remove(place)
        for g, part in enumerate(parts):
            for i in part:
                atom = ops[g].inputs[i]
                kind = (dtype_of(atom), jnp.ndim(abstract(atom)))
                by_kind.setdefault(kind, [[] for _ in ops])[g].append(i)
        for rows in by_kind.values():
            for row in zip_longest(*rows):
                enter(row)
        return columns, own

    def _match_constants(self, ops: list[Op], parts: list[list[int]]) -> list[list[int]]:
        """Return the rows of positions among `parts` at which all groups have the same value."""
        found: list[list[int]] = []
        used: list[set[int]] = [set() for _ in ops]
        for offset, place in enumerate(parts[0]):
            row = [place]
            for g in range(1, len(ops)):
                # Most often it has the same position, so look there first.
                near = [*parts[g][offset : offset + 1], *parts[g]]
                first = ops[0].inputs[place]
                alike = (
                    i
                    for i in near
                    if i not in used[g] and self._is_same_value(g, first, ops[g].inputs[i])
                )
                row += [i for i in [next(alike, None)] if i is not None]
            if len(row) == len(ops):
                found.append(row)
                for taken, i in zip(used, row, strict=True):
                    taken.add(i)
        return found

    def _is_same_value(self, group: int, first: Any, atom: Any) -> bool:
        """Whether an operand of the first group and one of another group are the same value."""
        if isinstance(first, Key):
            slot = self.env[0].get(first)
            return isinstance(atom, Key) and slot is not None and self.env[group].get(atom) is slot
        return type(atom) is type(first) and self._get_common((first, atom)) is not None

    # Between two collectives

    def _process_region(self, ends: Sequence[int]) -> None:
        """Run the operations that all groups share, and keep the others for the next switch."""
        regions = [ops[self.done[g] : ends[g]] for g, ops in enumerate(self.ops)]
        twins = [_align(regions[0], region) for region in regions]
        by_name = [_group_by_name(region) for region in regions]
        # What is left of an operation after its common results were computed: None if nothing is.
        left: dict[int, Op | None] = {}
        for i, first in enumerate(regions[0]):
            near = [region[t[i]] for region, t in zip(regions, twins, strict=True) if i in t]
            is_matched = len(near) == len(regions) and not any(id(op) in left for op in near)
            alike = near if is_matched and self._is_common(near) else None
            if alike is None:
                alike = self._find_alike(first, by_name, left)
            if alike is not None:
                self._run_once(alike)
                left.update(dict.fromkeys(map(id, alike)))
                continue
            split = split_by_results(near, self._is_common) if is_matched else None
            if split is not None:
                common, others = split
                self._run_once(common)
                left.update(zip(map(id, near), others, strict=True))
        for g, region in enumerate(regions):
            rest = (left.get(id(op), op) for op in region)
            self.pending[g] += [op for op in rest if op is not None]
            self.done[g] = ends[g]

    def _find_alike(
        self, first: Op, by_name: list[dict[str, list[Op]]], left: dict[int, Op | None]
    ) -> list[Op] | None:
        """Return operations of all groups that are the same as one of the first group, or None.

        Groups may have other operations around them, so they need not be in the same order.
        """
        if not all(a in self.env[0] for a in _select_keys(first.inputs)):
            return None
        found = [first]
        for group in range(1, self.groups.count):
            others = (op for op in by_name[group].get(first.name, ()) if id(op) not in left)
            alike = (op for op in others if self._is_alike(group, first, op))
            found += [op for op in [next(alike, None)] if op is not None]
        return found if len(found) == self.groups.count and self._is_common(found) else None

    def _is_alike(self, group: int, first: Op, op: Op) -> bool:
        return (
            len(first.inputs) == len(op.inputs)
            and all(
                self._is_same_value(group, *ab) for ab in zip(first.inputs, op.inputs, strict=True)
            )
            and is_same(first, op)
        )

    def _is_common(self, ops: list[Op]) -> bool:
        if _compat.has_side_effects(ops[0].eqn) or not all(is_same(ops[0], op) for op in ops[1:]):
            return False
        return all(
            self._get_common(atoms) is not None
            for atoms in zip(*(op.inputs for op in ops), strict=True)
        )

    def _get_common(self, atoms: Sequence[Any]) -> Any:
        """Return a value that is computed and the same in all groups: a slot or a constant."""
        first = atoms[0]
        if isinstance(first, Key):
            slot = self.env[0].get(first)
            pairs = zip(self.env, atoms, strict=True)
            return slot if all(isinstance(a, Key) and e.get(a) is slot for e, a in pairs) else None
        if isinstance(first, Const):
            alike = all(isinstance(a, Const) and is_equal(a.value, first.value) for a in atoms)
            return first.value if alike else None
        alike = all(isinstance(a, Literal) and is_equal(a, first) for a in atoms)
        return first.val if alike else None

    def _run_once(self, ops: list[Op]) -> None:
        eqn = ops[0].eqn
        ready = [self._get_common(atoms) for atoms in zip(*(o.inputs for o in ops), strict=True)]
        operands = [x.value if isinstance(x, Slot) else x for x in ready]
        outputs = self._make_common_slots(_compat.bind_like(eqn, operands, eqn.params))
        for g, op in enumerate(ops):
            self.env[g].update(zip(op.outputs, outputs, strict=True))

    def _make_common_slots(self, values: Iterable[Any]) -> list[Slot]:
        return [Slot(v, (jnp.shape(v),) * self.groups.count) for v in values]

    # The branches

    def _get_slots(self, wanted: list[tuple[Any, ...]]) -> list[Slot]:
        """Return slots for values that are given by an atom in each group; run a switch if needed.

        A value that is the same in all groups needs none.
        """
        ready = [self._get_common(atoms) for atoms in wanted]
        missing = [atoms for atoms, slot in zip(wanted, ready, strict=True) if slot is None]
        made = iter(self._run_switch(missing) if missing else [])
        found = [next(made) if slot is None else slot for slot in ready]
        return [s if isinstance(s, Slot) else self._make_common_slots([s])[0] for s in found]

    def _run_switch(self, wanted: list[tuple[Any, ...]]) -> list[Slot]:
        """Run the pending operations of each group in a switch.

        Args:
            wanted: The atoms whose slots the caller needs, for each group. The switch also returns
                what later operations read.
        """
        columns = [*wanted, *self._list_needed_later(wanted)]
        shapes = [list_shapes(column) for column in columns]
        # Pass only the slots that a branch reads, each once.
        slots = list({id(s): s for s in self._iterate_read_slots(columns)}.values())
        number = {id(s): i for i, s in enumerate(slots)}

        def make_branch(group: int) -> Any:
            def branch(values: list[Any]) -> list[Any]:
                env = {
                    key: slice_to(values[number[id(slot)]], slot.shapes[group])
                    for key, slot in self.env[group].items()
                    if id(slot) in number
                }

                def read(atom: Any) -> Any:
                    if isinstance(atom, Key):
                        return env[atom]
                    return atom.value if isinstance(atom, Const) else atom.val

                for op in self.pending[group]:
                    results = _compat.bind_like(op.eqn, [read(a) for a in op.inputs], op.eqn.params)
                    env.update(zip(op.outputs, results, strict=True))
                return [
                    pad_to_largest(
                        None if column[group] is None else read(column[group]), column, shape
                    )
                    for column, shape in zip(columns, shapes, strict=True)
                ]

            return branch

        branches = [make_branch(g) for g in range(self.groups.count)]
        values = jax.lax.switch(self.groups.get_own_group(), branches, [s.value for s in slots])
        made = [Slot(v, shape) for v, shape in zip(values, shapes, strict=True)]
        for column, slot in zip(columns, made, strict=True):
            for g, atom in enumerate(column):
                if isinstance(atom, Key):
                    self.env[g][atom] = slot
        self.pending = [[] for _ in self.pending]
        return made[: len(wanted)]

    def _iterate_read_slots(self, columns: list[tuple[Any, ...]]) -> Iterable[Slot]:
        for g, pending in enumerate(self.pending):
            read = [*(a for op in pending for a in op.inputs), *(c[g] for c in columns)]
            for atom in read:
                if isinstance(atom, Key) and atom in self.env[g]:
                    yield self.env[g][atom]

    def _list_needed_later(self, wanted: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return results of pending operations that are read later, in columns by dtype and rank.

        Sharing a column between groups keeps the number of results of the switch small.
        """
        by_kind: dict[Any, list[list[Key]]] = {}
        for g, pending in enumerate(self.pending):
            read = [a for op in self.ops[g][self.done[g] :] for a in op.inputs]
            later = set(_select_keys([*read, *self.results[g]])) - set(
                _select_keys(c[g] for c in wanted)
            )
            for key in (k for op in pending for k in op.outputs if k in later):
                kind = (key.aval.dtype, key.aval.ndim)
                by_kind.setdefault(kind, [[] for _ in self.pending])[g].append(key)
        return [column for columns in by_kind.values() for column in zip_longest(*columns)]

    # The collectives

    def _communicate(
        self, ops: list[Op], slots: list[Slot], operands: Sequence[Sequence[Slot]]
    ) -> list[Slot]:
        """Run a collective, or a loop that has one.

        Args:
            ops: The operation of each group.
            slots: The operands of the first group.
            operands: The operands of each group.
        """
        eqn = ops[0].eqn
        if eqn.primitive is UNEVEN_ALL_GATHER:
            check_same_gather(ops, slots[0].shapes, self.groups)
            return self._make_common_slots([gather_padded(slots[0].value, eqn.params)])
        if ops[0].name in LOOPS:
            run = functools.partial(run_joined, groups=self.groups)
            return LOOPS[ops[0].name](ops, operands, run)
        check_same_shapes(ops, self.groups)
        results = _compat.bind_like(eqn, [s.value for s in slots], eqn.params)
        return self._make_common_slots(results)


def _align(first: list[Op], second: list[Op]) -> dict[int, int]:
    """Return for positions in `first` the positions in `second` that most likely correspond."""
    # A wrong match is harmless: `_is_common` compares the operations themselves, and
    # `_find_alike` looks at the others.
    if [op.name for op in first] == [op.name for op in second]:
        return {i: i for i in range(len(first))}
    matcher = difflib.SequenceMatcher(
        None, [op.name for op in first], [op.name for op in second], autojunk=False
    )
    return {
        block.a + i: block.b + i
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    }


def _group_by_name(ops: Iterable[Op]) -> dict[str, list[Op]]:
    found: dict[str, list[Op]] = {}
    for op in ops:
        found.setdefault(op.name, []).append(op)
    return found


def _select_keys(atoms: Iterable[Any]) -> list[Key]:
    return [a for a in atoms if isinstance(a, Key)]
