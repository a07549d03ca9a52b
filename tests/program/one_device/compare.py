"""Compares the numbers of a program on replicas with those of plain JAX on one device."""

import jax.numpy as jnp
import numpy as np

from tests.program.one_device import meanings
from tests.program.one_device.exclusions import is_not_run_op_by_op
from tests.program.one_device.meanings import Numbers
from tests.program.one_device.sources import Program

Arrays = dict[str, np.ndarray]


def arrays_of(numbers: Numbers) -> Arrays:
    """Name the arrays of all steps; rows of replicas are joined.

    Raises:
        AssertionError: A value that has to be equal on all replicas is not.
    """
    found: Arrays = {}
    for step, (state, rows, equal) in enumerate(numbers):
        for what, values in (("state", state), ("rows", rows), ("equal", equal)):
            for name, value in values.items():
                assert what == "rows" or not isinstance(value, list), (
                    f"{name} of step {step} differs between replicas: {value}"
                )
                joined = np.concatenate(value) if isinstance(value, list) else value
                found[f"{what} {name} of step {step}"] = joined
    return found


def differences(program: Program, one: Arrays, own: Arrays) -> dict[str, str]:
    """Return what differs by more than it may, with the reason."""
    wrong: dict[str, str] = {}
    assert own, "nothing to compare"
    assert own.keys() <= one.keys(), f"{sorted(one)} and {sorted(own)}"
    parts: list[Arrays] | None = None
    rounding = 1e-6 * largest_change(one)
    for name, b in own.items():
        a = one[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            wrong[name] = f"{a.dtype}{a.shape} on one device, {b.dtype}{b.shape} on replicas"
            continue
        least = tolerance(a, program.dtype)
        if is_close(a, b, least):
            continue
        if parts is None:
            parts = [arrays_of(meanings.in_parts(program, n)) for n in numbers_of_parts(program)]
            # What is zero in exact numbers, or differs by chance in none of few parts, is rounding.
            parts += [arrays_of(meanings.on_one_device(program, moved=s)) for s in (1, 2)]
            # XLA rounds less often where it fuses operations.
            parts += map(arrays_of, meanings.with_other_roundings(program))
        spread = [distance(a, other[name]) for other in parts if other[name].shape == a.shape]
        if name.startswith("state ") and jnp.issubdtype(a.dtype, jnp.floating):
            spread.append(rounding)
        if not is_close(a, b, max([least, *(4 * s for s in spread)])):
            wrong[name] = f"off by {distance(a, b)}, may be {least}, in parts {spread}\n{a}\n{b}"
    return wrong


def largest_change(one: Arrays) -> float:
    """The largest change of state between two steps.

    The backward pass rounds at its largest terms, so a gradient that is zero in exact numbers (of
    the bias of keys in attention) is some rounding of the others.
    """
    states = {name: a for name, a in one.items() if name.startswith("state ")}
    changes = [0.0]
    for name, after in states.items():
        start, _, step = name.rpartition(" ")
        before = states.get(f"{start} {int(step) - 1}")
        if before is not None and before.shape == after.shape:
            if jnp.issubdtype(after.dtype, jnp.floating):
                changes.append(distance(before, after))
    return max(change for change in changes if np.isfinite(change))


def numbers_of_parts(program: Program) -> list[int]:
    """The numbers of equal parts to try: the nearest to the number of replicas first."""
    count = sum(program.rows)
    divisors = [d for d in range(2, count + 1) if count % d == 0]
    return sorted(divisors, key=lambda d: abs(d - len(program.rows)))[:3]


def tolerance(a: np.ndarray, dtype: str) -> float:
    """1e-5 of the largest entry, or 2 steps of bfloat16 at it in programs of that dtype."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return 0.0
    wide = a.astype(np.float64)
    largest = float(np.max(np.abs(wide[np.isfinite(wide)]), initial=0.0))
    if dtype == "bfloat16":
        return float(2 * 2.0 ** (np.floor(np.log2(largest)) - 7)) if largest else 0.0
    return 1e-5 * largest


def is_close(a: np.ndarray, b: np.ndarray, by: float) -> bool:
    """Whether nan and inf are at the same places, and all else differs by no more than `by`."""
    return distance(a, b) <= by


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; infinite where one is nan or inf and the other is not equal."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.all(same | finite):
        return float("inf")
    return float(np.max(np.abs(np.where(same, 0.0, x) - np.where(same, 0.0, y)), initial=0.0))


def check(program: Program) -> None:
    """Run a program in all ways; raises AssertionError where it differs from one device."""
    one = arrays_of(meanings.on_one_device(program))
    for op_by_op in (False, True):
        # Op by op, each replica has a device.
        no_op_by_op = program.strategy == "virtual" or is_not_run_op_by_op(program)
        if op_by_op and no_op_by_op:
            continue
        own = arrays_of(meanings.on_replicas(program, op_by_op=op_by_op))
        wrong = differences(program, one, own)
        listed = "\n".join(f"{name}: {why}" for name, why in wrong.items())
        assert not wrong, f"{'op by op' if op_by_op else 'compiled'}\n{listed}\n{program}"
