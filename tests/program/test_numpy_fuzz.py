"""Random steps give the same compiled, op by op and in NumPy: values, nan, and which are equal."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica, Variable, VariableAggregation, VariableSynchronization
from tests.program.numpy_programs import SIZE, Net, Program, State
from tests.tables import sampled

SEEDS = range(500)
STEPS = 2


def strategy_of(seed: int) -> jaxdist.MirroredStrategy:
    """Two to eight replicas, some of them virtual."""
    count = (2, 3, 4, 8, 2)[seed % 5]
    devices = [f"cpu:{i}" for i in range(count)]
    if seed % 5 == 4:
        return jaxdist.MirroredStrategy(devices, deterministic=4)
    return jaxdist.MirroredStrategy(devices)


def ran(program: Program, strategy: Any, *, eagerly: bool) -> tuple[list[Any], list[Any]]:
    """The results of each step, and the state after them."""
    with strategy.scope():
        total = Variable(jnp.zeros(SIZE), aggregation=VariableAggregation.SUM)
        own = Variable(
            jnp.zeros(SIZE),
            aggregation=VariableAggregation.SUM,
            synchronization=VariableSynchronization.ON_READ,
        )
    net = Net(program.weight)
    given = (
        list(map(jnp.asarray, program.same)),
        PerReplica(list(program.own)),
        PerReplica(list(program.rows)),
        net,
        total,
        own,
    )
    found = []

    def step(*args: Any) -> Any:
        return program.step(*args)

    with jaxdist.config.run_eagerly(eagerly):
        found = [strategy.run(step, given) for _ in range(STEPS)]
    copies = [np.asarray(v) for v in own.values]
    return found, [np.asarray(net.weight[...]), np.asarray(total), *copies]


def rows_of(value: Any, count: int) -> np.ndarray:
    """What each replica has of a result."""
    if isinstance(value, PerReplica):
        return np.stack([np.asarray(v) for v in value.values])
    return np.stack([np.asarray(value)] * count)


def same(found: Any, wanted: Any, what: str, bound: float) -> None:
    found, wanted = np.asarray(found, "float64"), np.asarray(wanted, "float64")
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted), err_msg=what)
    np.testing.assert_allclose(found, wanted, rtol=bound, atol=bound, err_msg=what)


def compared(seed: int) -> str:
    """Run the program of a seed in all ways; which ways there were."""
    strategy = strategy_of(seed)
    count = strategy.num_replicas_in_sync
    program = Program(seed, count)
    is_virtual = strategy.layout.num_virtual is not None
    if is_virtual and program.is_uneven:
        program.rows = [np.resize(x, (3, SIZE)) for x in program.rows]
    compiled, after = ran(program, strategy, eagerly=False)
    state = State(
        {"weight": program.weight.astype("float64")}, np.zeros(SIZE), [np.zeros(SIZE)] * count
    )
    for number in range(STEPS):
        wanted = program.in_numpy(state)
        for i, (value, rows) in enumerate(zip(compiled[number], wanted, strict=True)):
            what = f"step {number}, value {i}\n{program}"
            same(rows_of(value, count), np.stack(rows), what, 2e-2)
            if not isinstance(value, PerReplica):
                same(np.stack(rows), np.stack([rows[0]] * count), f"{what} is called equal", 1e-6)
    wanted_after = [state.net["weight"], state.total, *state.own]
    for found, value in zip(after, wanted_after, strict=True):
        same(found, value, f"state\n{program}", 2e-2)
    try:
        eagerly, eagerly_after = ran(program, strategy, eagerly=True)
    except jaxdist.errors.ContextError:
        assert is_virtual
        return "compiled"
    for number in range(STEPS):
        for i, (a, b) in enumerate(zip(compiled[number], eagerly[number], strict=True)):
            what = f"step {number}, value {i}, op by op\n{program}"
            same(rows_of(b, count), rows_of(a, count), what, 2e-3)
            if not isinstance(a, PerReplica):
                assert not isinstance(b, PerReplica), what
    for found, value in zip(eagerly_after, after, strict=True):
        same(found, value, f"state, op by op\n{program}", 2e-3)
    return "both"


@pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")
@pytest.mark.parametrize("seed", sampled(SEEDS, 3))
def test_program_is_that_of_numpy(seed: int) -> None:
    compared(seed)
