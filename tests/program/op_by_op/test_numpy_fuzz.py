"""Random steps give the same compiled, op by op and in NumPy: values, nan, dtypes and kinds."""

import dataclasses
from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import ArgumentError, ContextError, ShapeError
from tests.program.oracle.numpy_collectives import COLLECTIVE
from tests.program.oracle.numpy_kinds import equal_values
from tests.program.oracle.numpy_programs import AROUND, FORMS, OWN, SAME, Program
from tests.program.oracle.numpy_state import (
    NNX,
    VARIABLES,
    Known,
    State,
    can_be_read,
    new_state,
    read_across,
)
from tests.program.oracle.numpy_values import LOCAL, ROWS, TWO
from tests.tables import sampled

SEEDS = range(500)
STEPS = 2


@dataclasses.dataclass(frozen=True)
class Layout:
    """The number of replicas and of devices."""

    count: int
    num_devices: int

    @property
    def is_virtual(self) -> bool:
        """Whether replicas share devices."""
        return self.count != self.num_devices

    def strategy(self, *, virtual: bool) -> jaxdist.MirroredStrategy:
        """The strategy; or, for the same replicas, one with a device for each."""
        devices = [f"cpu:{i}" for i in range(self.num_devices if virtual else self.count)]
        if virtual and self.is_virtual:
            return jaxdist.MirroredStrategy(devices, deterministic=self.count)
        return jaxdist.MirroredStrategy(devices)


LAYOUTS = [
    Layout(*sizes) for sizes in ((2, 2), (3, 3), (2, 1), (2, 2), (4, 4), (4, 2), (3, 3), (2, 2))
]
# A few on all devices.
MANY = [Layout(8, 8), Layout(8, 4)]


def layout_of(seed: int) -> Layout:
    if seed % 25 < 2:
        return MANY[seed % 25]
    return LAYOUTS[seed % len(LAYOUTS)]


def program_of(seed: int) -> Program:
    layout = layout_of(seed)
    return Program(seed, layout.count, can_be_uneven=not layout.is_virtual, num_steps=STEPS)


def ran(
    program: Program, strategy: Any, *, eagerly: bool, steps: int = STEPS
) -> tuple[list[Any], list[Any]]:
    """The results of each step, and the state after it."""
    with strategy.scope():
        state = new_state(program.weight, program.variables)
    net, optimizer, variables = state.net, state.optimizer, state.variables
    uses_net = any(op.kind == "nnx" for op in program.ops)

    def step(same: Any, own: Any, rows: Any, *objects: Any) -> Any:
        used_net, used_optimizer = objects or (None, None)
        return program.step(same, own, State(rows, used_net, used_optimizer, variables))

    given: tuple[Any, ...] = (
        list(map(jnp.asarray, program.same)),
        # A replica has no rows if none of its own arguments has any.
        PerReplica(list(program.own)) if all(map(len, program.rows)) else np.stack(program.own),
        PerReplica(list(program.rows)),
        *(net, optimizer) * uses_net,
    )
    found, after = [], []
    with jaxdist.config.run_eagerly(eagerly):
        for _ in range(steps):
            found.append(strategy.run(step, given))
            after.append(_snapshot(net, variables))
    return found, after


def _snapshot(net: Any, variables: dict[str, Any]) -> dict[str, Any]:
    """Return the state outside of steps."""
    spread = net.spread
    found = {
        "weight": net.weight[...],
        "running mean": net.norm.mean[...],
        "running variance": net.norm.var[...],
        "average": jnp.stack([net.average.total[...], net.average.count[...]]),
        "spread": jnp.stack([spread.count[...], spread.mean[...], spread.m2[...]]),
        "draws": net.rngs.noise.count[...],
    }
    for name, variable in variables.items():
        for i, copy in enumerate(variable.values):
            found[f"{name}, copy {i}"] = copy
        if can_be_read(name):
            found[name] = variable.read_value()
        else:
            with pytest.raises(ArgumentError, match="NONE"):
                variable.read_value()
    return {k: np.asarray(v) for k, v in found.items()}


def _wanted(known: Known, layout: Layout) -> dict[str, Any]:
    """Run the same steps in NumPy."""
    with np.errstate(all="ignore"):
        seen = np.array(known.seen)
        spread = [seen.size, seen.mean(), seen.var() * seen.size] if known.seen else [0, 0, 0]
    found = {
        "weight": known.weight,
        "running mean": known.mean,
        "running variance": known.var,
        "average": [known.total, known.number],
        "spread": spread,
        "draws": known.draws,
    }
    for name, value in known.variables.items():
        copies = [value] * layout.count if VARIABLES[name].is_equal else value
        for i, copy in enumerate(copies):
            found[f"{name}, copy {i}"] = copy
        if can_be_read(name):
            found[name] = read_across(name, known)
    return found


def _check_state(found: dict[str, Any], wanted: dict[str, Any], what: str, bound: float) -> None:
    assert set(found) == set(wanted), (set(found) ^ set(wanted), what)
    for name, value in found.items():
        a, b = np.asarray(value, "float64"), np.asarray(wanted[name], "float64")
        if name == "spread":
            # Flax's own is inf or nan after an infinity, as its updates come.
            a, b = (np.where(np.isfinite(x), x, np.nan) for x in (a, b))
        same(a, b, f"{name} {what}", bound)


def rows_of(value: Any, count: int) -> list[np.ndarray]:
    """Return the value of a result on each replica."""
    if isinstance(value, PerReplica):
        return [np.asarray(v) for v in value.values]
    return [np.asarray(value)] * count


def same(found: Any, wanted: Any, what: str, bound: float) -> None:
    found, wanted = np.asarray(found, "float64"), np.asarray(wanted, "float64")
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted), err_msg=what)
    np.testing.assert_allclose(found, wanted, rtol=bound, atol=bound, err_msg=what)


def check(program: Program, found: list[Any], after: list[Any], layout: Layout, way: str) -> None:
    """Compare results and state with NumPy's."""
    is_equal = equal_values(program.ops, [True, True, False, False], uneven=program.has_uneven_rows)
    for number in range(len(found)):
        pool, rows = program.expected[number]
        values = [*found[number]["pool"], found[number]["rows"]]
        for i, (value, wanted) in enumerate(zip(values, [*pool, rows], strict=True)):
            what = f"{way}, step {number}, value {i}\n{program}"
            for own, own_wanted in zip(rows_of(value, layout.count), wanted, strict=True):
                assert own.shape == np.shape(own_wanted), what
                same(own, own_wanted, what, 1e-2)
            if i < len(pool):
                for own in rows_of(value, layout.count):
                    assert own.dtype == FORMS[program.forms[i]][1], what
                assert not (is_equal[i] and isinstance(value, PerReplica)), f"not equal: {what}"
        state = _wanted(program.after[number], layout)
        _check_state(after[number], state, f"{way}, step {number}\n{program}", 1e-2)


def _check_across(strategy: Any, program: Program, found: Any, count: int) -> None:
    """Bring results together outside of the step."""
    pool, rows = program.expected[-1]
    if isinstance(found["rows"], PerReplica):
        same(strategy.gather(found["rows"], axis=0), np.concatenate(rows), "gather", 1e-2)
    for value, wanted, form in zip(found["pool"], pool, program.forms, strict=True):
        if isinstance(value, PerReplica) and form == "float32" and count > 1:
            whole = np.stack(wanted)
            for op, result in (("SUM", whole.sum(0)), ("MEAN", whole.mean(0))):
                same(strategy.reduce(op, value, axis=None), result, f"reduce {program}", 1e-2)
            same(strategy.reduce("MEAN", value, axis=0), whole.mean(), f"reduce {program}", 1e-2)
            same(strategy.gather(value, axis=0), whole.reshape(-1), f"gather {program}", 1e-2)
            return


def compared(seed: int) -> None:
    """Run the program of a seed in all ways."""
    layout, program = layout_of(seed), program_of(seed)
    strategy = layout.strategy(virtual=True)
    compiled, after = ran(program, strategy, eagerly=False)
    check(program, compiled, after, layout, "compiled")
    with np.errstate(all="ignore"):
        _check_across(strategy, program, compiled[-1], layout.count)
    if layout.is_virtual:
        with pytest.raises(ContextError, match="op by op"):
            ran(program, strategy, eagerly=True)
        # Op by op there is a device for each of them.
        layout = Layout(layout.count, layout.count)
        strategy = layout.strategy(virtual=False)
    try:
        # Op by op takes most of the time, and the compiled run already tests a second step.
        steps = STEPS if seed % 4 == 0 else 1
        eagerly, eagerly_after = ran(program, strategy, eagerly=True, steps=steps)
    except ValueError as error:
        # The only operation that op by op rejects.
        notes = getattr(error, "__notes__", ())
        if all(map(len, program.rows)) or not any("Run this step compiled" in n for n in notes):
            raise
        return
    check(program, eagerly, eagerly_after, layout, "op by op")
    for number in range(len(eagerly)):
        pairs = zip(compiled[number]["pool"], eagerly[number]["pool"], strict=True)
        for i, (a, b) in enumerate(pairs):
            what = f"step {number}, value {i}, op by op\n{program}"
            both = zip(rows_of(b, layout.count), rows_of(a, layout.count), strict=True)
            for own, own_compiled in both:
                same(own, own_compiled, what, 2e-3)
            assert isinstance(a, PerReplica) or not isinstance(b, PerReplica), what


@pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")
@pytest.mark.filterwarnings("ignore::jaxdist.errors.UnevenMeanWarning")
@pytest.mark.parametrize("seed", sampled(SEEDS, 3))
def test_program_is_that_of_numpy(seed: int) -> None:
    compared(seed)


@pytest.mark.parametrize("seed", sampled(range(8), 1))
def test_uneven_rows_of_virtual_replicas_are_refused(seed: int) -> None:
    layout = Layout(4, 2)
    program = Program(seed, layout.count)
    program.rows[0] = program.rows[1][:1]
    with pytest.raises(ShapeError, match="virtual"):
        ran(program, layout.strategy(virtual=True), eagerly=False)


def features(seed: int) -> set[str]:
    """Return the features of the program of a seed."""
    layout, program = layout_of(seed), program_of(seed)
    found = {f"result {form}" for form in program.forms}
    found |= {"uneven"} if program.has_uneven_rows else set()
    found |= {"no rows"} if not all(map(len, program.rows)) else set()
    found |= {"virtual"} if layout.is_virtual else set()
    found |= {"state"} if program.has_state else set()
    if program.special is not None:
        found.add("nan" if np.isnan(program.special) else "inf")
    for op in program.ops:
        for inner, path in op.walk():
            found.add(f"{inner.kind} {inner.name}".strip())
            found |= {f"{inner.kind} in {kind}" for kind in path}
    # The first four values are inputs; the others are equal only by proof.
    equal = equal_values(program.ops, [True, True, False, False])
    return found | {"proved equal"} if any(equal[4:]) else found


def wanted_features() -> dict[str, int]:
    """How many of the 500 programs must have each feature."""
    least = dict.fromkeys([*SAME, *OWN, *AROUND], 25)
    least |= dict.fromkeys(("uneven", "nan", "inf", "state", "virtual", "proved equal"), 80)
    least["no rows"] = 20
    least |= {f"result {form}": 80 for form in FORMS}
    for kind, table, number in (
        ("local", LOCAL, 10),
        ("two", TWO, 10),
        ("rows", ROWS, 10),
        ("collective", COLLECTIVE, 10),
        ("variable", VARIABLES, 6),
        ("nnx", NNX, 25),
    ):
        least |= {f"{kind} {name}": number for name in table}
    least |= {f"collective in {kind}": 15 for kind in (*SAME, *AROUND)}
    least |= {f"variable in {kind}": 10 for kind in (*SAME, "jit")}
    return least


@pytest.mark.long
def test_the_programs_have_everything_in_them() -> None:
    found = Counter(feature for seed in SEEDS for feature in features(seed))
    missing = {n: (found[n], least) for n, least in wanted_features().items() if found[n] < least}
    assert not missing, f"(found, least) of {len(SEEDS)}: {missing}"
