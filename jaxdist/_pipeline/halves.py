"""Divides a backward program into two: gradients of the input first, those of the weights later.

Note:
    The first half does what the needed results depend on. The second half does the rest, and reads
    values of the first that are saved for it: nothing is computed twice, except operations that
    cost nothing, such as a transposed view of an input. The backward of a product with weights, for
    instance, is two products. Only that with the weights leads to the gradient of the input; the
    other one needs the input of the layer and the cotangent of its output, which are saved.

    A loop is divided into two loops. The second one reads what the first has saved in each
    iteration. Calls are written out. Other operations with several results, such as `cond` and
    `while`, are not divided: they are in the first half if it needs one of their results, and a
    result that the first half has anyway is a result of the first half. So a program that cannot be
    divided is all in the first half.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DropVar, Literal

from jaxdist import _compat

# They move or view data. To do them again is less than to save their results.
_CHEAP = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "iota",
    "reshape",
    "squeeze",
    "transpose",
}


def divide(program: ClosedJaxpr, needed: Sequence[bool], available: Sequence[bool]) -> "Halves":
    """Divide a program into a half with the needed results, and a half with the others.

    Args:
        program: The program.
        needed: Which results the first half computes.
        available: Which inputs the second half gets again. It saves of the others what it needs.
    """
    flat = write_out_calls(program)
    halves = Halves(flat.jaxpr, flat.consts, needed, available)
    early = halves.has_early
    # A result that the first half has anyway would only wait for the second.
    return Halves(flat.jaxpr, flat.consts, early, available) if early != [*needed] else halves


def write_out_calls(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same program without calls, also in the bodies of loops."""

    def run(jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        env = _Env(jaxpr, consts, operands)
        for eqn in jaxpr.eqns:
            found = [env.read(v) for v in eqn.invars]
            name = eqn.primitive.name
            if name in _compat.CALLS:
                inner = eqn.params[_compat.CALLS[name]]
                results = run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), found)
            elif name == "scan":
                results = _run_scan(eqn, found, run)
            else:
                results = _compat.bind_like(eqn, found, eqn.params)
            env.write(eqn.outvars, results)
        return [env.read(v) for v in jaxpr.outvars]

    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals]
    return jax.make_jaxpr(lambda *a: run(program.jaxpr, program.consts, a))(*avals)


def _run_scan(eqn: Any, operands: list[Any], run: Any) -> list[Any]:
    body = eqn.params["jaxpr"]
    num_consts, num_carry = _compat.get_scan_counts(eqn.params)
    consts = operands[:num_consts]

    def run_body(carry: Any, rows: Any) -> tuple[Any, Any]:
        found = run(body.jaxpr, body.consts, [*consts, *carry, *rows])
        return found[:num_carry], found[num_carry:]

    start, rows = operands[num_consts : num_consts + num_carry], operands[num_consts + num_carry :]
    carry, stacked = jax.lax.scan(run_body, start, rows, **_get_loop(eqn))
    return [*carry, *stacked]


def _get_loop(eqn: Any) -> dict[str, Any]:
    return {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


class _Env:
    """The values of the variables of an open program."""

    def __init__(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> None:
        self._values = dict(zip(jaxpr.constvars, consts, strict=True))
        self._values.update(zip(jaxpr.invars, operands, strict=True))

    def read(self, v: Any) -> Any:
        return v.val if isinstance(v, Literal) else self._values[v]

    def find(self, v: Any) -> Any:
        """Return None for what this half does not have."""
        return v.val if isinstance(v, Literal) else self._values.get(v)

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        self._values.update(zip(variables, values, strict=True))


class _Step:
    """An operation of a program, and the halves that do it."""

    def __init__(self, eqn: Any) -> None:
        self.eqn = eqn
        self.loop: _Loop | None = None
        self.in_first = self.in_second = False

    @property
    def results_of_first(self) -> list[Any]:
        """The variables that the first half computes here."""
        if self.loop is not None:
            return _where(self.eqn.outvars, self.loop.wanted)
        return list(self.eqn.outvars) if self.in_first else []

    @property
    def operands_of_second(self) -> list[Any]:
        """The variables that the second half reads here."""
        if self.loop is not None:
            return self.loop.operands_of_second
        return _variables(self.eqn.invars) if self.in_second else []


class Halves:
    """A program in two halves.

    Args:
        jaxpr: The open program, without calls.
        consts: Its constants.
        needed: Which results the first half computes.
        available: Which inputs the second half gets again.

    Attributes:
        needed: Which results the first half computes; the second computes the others.
        has_early: Which results the first half has: those needed, and those it computes anyway.
        live: The inputs that the first half reads.
        inputs_of_second: The inputs that the second half reads again.
    """

    def __init__(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        needed: Sequence[bool],
        available: Sequence[bool],
    ) -> None:
        self._jaxpr, self._consts = jaxpr, consts
        self.needed = list(needed)
        self._steps = [_Step(eqn) for eqn in jaxpr.eqns]
        live = set(_variables(_where(jaxpr.outvars, needed)))
        for step in reversed(self._steps):
            live |= _assign(step, live)
        self.live = live
        made = {v for step in self._steps for v in step.results_of_first}
        self.has_early = [
            n or (not isinstance(v, Literal) and v in made)
            for v, n in zip(jaxpr.outvars, map(bool, needed), strict=True)
        ]
        again = self._find_repeatable(available)
        wants = set(_variables(_where(jaxpr.outvars, [not n for n in needed])))
        for step in reversed(self._steps):
            if step in again and not wants.isdisjoint(step.eqn.outvars):
                step.in_second = True
            wants.update(step.operands_of_second)
        repeated = {
            v for step in self._steps if step.in_first and step.in_second for v in step.eqn.outvars
        }
        lent = [v for v, has in zip(jaxpr.invars, available, strict=True) if not has]
        order = [*lent, *(v for step in self._steps for v in step.results_of_first)]
        # What the second half reads, and only the first half has.
        self._saved = [v for v in dict.fromkeys(order) if v in wants - repeated]
        self.inputs_of_second = {v for v in jaxpr.invars if v in wants} - set(lent)

    def _find_repeatable(self, available: Sequence[bool]) -> set[_Step]:
        """The cheap operations of the first half that the second can do from its own inputs."""
        has = {*_where(self._jaxpr.invars, available), *self._jaxpr.constvars}
        found = set()
        for step in self._steps:
            eqn = step.eqn
            if (
                step.in_first
                and eqn.primitive.name in _CHEAP
                and has.issuperset(_variables(eqn.invars))
            ):
                has.update(eqn.outvars)
                found.add(step)
        return found

    def first(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the first half.

        Args:
            operands: The inputs; those not in `live` are not read.

        Returns:
            The needed results, with None for the others; and what is saved.
        """
        env = _Env(self._jaxpr, self._consts, operands)
        stacks: list[Any] = []
        for step in self._steps:
            if step.loop is not None:
                results, saved = step.loop.first([env.find(v) for v in step.eqn.invars])
                env.write(step.results_of_first, results)
                stacks += saved
            elif step.in_first:
                _run_step(step.eqn, env)
        return self._read(env, self.needed), [env.read(v) for v in self._saved] + stacks

    def second(self, operands: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
        """Run the second half.

        Args:
            operands: The inputs; those not in `inputs_of_second` are not read.
            saved: What the first half has saved.

        Returns:
            The other results, with None for the needed ones.
        """
        env = _Env(self._jaxpr, self._consts, operands)
        env.write(self._saved, saved[: len(self._saved)])
        stacks = list(saved[len(self._saved) :])
        for step in self._steps:
            if step.loop is not None:
                count = step.loop.num_saved
                own, stacks = stacks[:count], stacks[count:]
                results = step.loop.second([env.find(v) for v in step.eqn.invars], own)
                outvars = _where(step.eqn.outvars, [not w for w in step.loop.wanted])
                env.write(outvars, results)
            elif step.in_second:
                _run_step(step.eqn, env)
        return self._read(env, [not n for n in self.needed])

    @property
    def num_saved(self) -> int:
        """The number of values that are saved."""
        return len(self._saved) + sum(s.loop.num_saved for s in self._steps if s.loop is not None)

    def _read(self, env: _Env, mask: Sequence[bool]) -> list[Any]:
        return [
            env.read(v) if wanted else None
            for v, wanted in zip(self._jaxpr.outvars, mask, strict=True)
        ]


def _assign(step: _Step, live: set[Any]) -> set[Any]:
    """Decide which half does a step, and return what the first half reads for it.

    Args:
        step: The step.
        live: The variables that the steps after it need in the first half.
    """
    eqn = step.eqn
    used = [v in live for v in eqn.outvars]
    if not any(used):
        step.in_second = True
        return set()
    is_mixed = any(
        not u and not isinstance(v, DropVar) for u, v in zip(used, eqn.outvars, strict=True)
    )
    if is_mixed and eqn.primitive.name == "scan":
        loop = _Loop(eqn, used)
        if not all(loop.wanted):
            step.loop = loop
            return loop.operands_of_first
    step.in_first = True
    return set(_variables(eqn.invars))


def _run_step(eqn: Any, env: _Env) -> None:
    operands = [env.read(v) for v in eqn.invars]
    env.write(eqn.outvars, _compat.bind_like(eqn, operands, eqn.params))


class _Loop:
    """A loop in two.

    Args:
        eqn: The `scan`.
        used: Which of its results the first half needs.

    Attributes:
        wanted: Which results the first loop computes; the second computes the others.
        operands_of_first: The operands that the first loop reads.
        operands_of_second: The operands that the second loop reads.
        num_saved: The number of stacks that the first saves for the second.
    """

    def __init__(self, eqn: Any, used: Sequence[bool]) -> None:
        self._eqn = eqn
        body = eqn.params["jaxpr"]
        self._num_consts, self._num_carry = _compat.get_scan_counts(eqn.params)
        inputs = body.jaxpr.invars
        carries = inputs[self._num_consts : self._num_consts + self._num_carry]
        wanted = list(used)
        while True:
            # A carry that the first loop has is saved, if the second needs it in an iteration.
            available = [True] * len(inputs)
            for n in range(self._num_carry):
                available[self._num_consts + n] = not wanted[n]
            self._body = Halves(body.jaxpr, body.consts, wanted, available)
            # A stack of what the first loop has anyway is its result; so is a carry it depends on.
            more = [c in self._body.live for c in carries] + self._body.has_early[len(carries) :]
            more = [w or m for w, m in zip(wanted, more, strict=True)]
            if more == wanted:
                break
            wanted = more
        self.wanted = wanted
        self.num_saved = self._body.num_saved
        starts = eqn.invars[self._num_consts : self._num_consts + self._num_carry]
        of_carries = wanted[: self._num_carry]
        body_first, body_second = self._body.live, self._body.inputs_of_second
        self._rows_of_first = [
            v in body_first for v in inputs[self._num_consts + self._num_carry :]
        ]
        self._rows_of_second = [
            v in body_second for v in inputs[self._num_consts + self._num_carry :]
        ]
        is_carry = set(carries)
        self.operands_of_first = {
            v
            for v, i in zip(eqn.invars, inputs, strict=True)
            if i in body_first - is_carry and not isinstance(v, Literal)
        } | set(_variables(_where(starts, of_carries)))
        self.operands_of_second = [
            v
            for v, i in zip(eqn.invars, inputs, strict=True)
            if i in body_second - is_carry and not isinstance(v, Literal)
        ] + _variables(_where(starts, [not w for w in of_carries]))

    def _split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        middle = self._num_consts + self._num_carry
        return (
            list(operands[: self._num_consts]),
            list(operands[self._num_consts : middle]),
            list(operands[middle:]),
        )

    def first(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the wanted results, and the stacks that are saved."""
        consts, starts, rows = self._split(operands)
        of_carries = self.wanted[: self._num_carry]
        of_stacks = self.wanted[self._num_carry :]

        def run_body(carry: list[Any], rows: list[Any]) -> Any:
            own = _spread(carry, of_carries)
            results, saved = self._body.first([*consts, *own, *rows])
            stacked = _where(results[self._num_carry :], of_stacks)
            return _where(results[: self._num_carry], of_carries), (stacked, saved)

        rows = [row if r else None for row, r in zip(rows, self._rows_of_first, strict=True)]
        carry, (stacked, saved) = jax.lax.scan(
            run_body, _where(starts, of_carries), rows, **_get_loop(self._eqn)
        )
        return [*carry, *stacked], saved

    def second(self, operands: Sequence[Any], saved: list[Any]) -> list[Any]:
        """Return the other results."""
        consts, starts, rows = self._split(operands)
        of_carries = [not w for w in self.wanted[: self._num_carry]]
        of_stacks = [not w for w in self.wanted[self._num_carry :]]

        def run_body(carry: list[Any], of_row: Any) -> Any:
            rows, saved = of_row
            own = _spread(carry, of_carries)
            results = self._body.second([*consts, *own, *rows], saved)
            stacked = _where(results[self._num_carry :], of_stacks)
            return _where(results[: self._num_carry], of_carries), stacked

        rows = [row if r else None for row, r in zip(rows, self._rows_of_second, strict=True)]
        carry, stacked = jax.lax.scan(
            run_body, _where(starts, of_carries), (rows, saved), **_get_loop(self._eqn)
        )
        return [*carry, *stacked]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [a for a in atoms if not isinstance(a, Literal)]


def _where(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [value for value, wanted in zip(values, mask, strict=True) if wanted]


def _spread(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Return the values at the places of `mask` that are true, and None at the others."""
    rest = iter(values)
    return [next(rest) if wanted else None for wanted in mask]
