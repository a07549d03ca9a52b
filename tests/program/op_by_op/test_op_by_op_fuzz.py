"""Random programs give the same op by op as compiled: values, and which of them are equal."""

from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist.errors import DivergentCollectiveError
from tests.program.oracle.random_programs import draw
from tests.program.proof.test_replication_fuzz import (
    LENGTH,
    MESHES,
    NUM_MIRRORED,
    NUM_PER_REPLICA,
    inputs_of,
    strategy_over,
)
from tests.tables import sampled


def _rows(value: Any, count: int) -> np.ndarray:
    if isinstance(value, jaxdist.PerReplica):
        return np.stack([np.asarray(v) for v in value.values])
    return np.stack([np.asarray(value)] * count)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(16), 8))
@pytest.mark.parametrize("mesh", list(MESHES))
def test_a_random_program_is_the_same_op_by_op(mesh: str, seed: int) -> None:
    axes = MESHES[mesh]
    strategy = strategy_over(axes)
    block = draw(7000 + seed, axes, NUM_MIRRORED + NUM_PER_REPLICA, LENGTH)
    mirrored, own = inputs_of(seed)
    arguments = (*mirrored, *[jaxdist.PerReplica(list(x)) for x in own])

    def step(*inputs: Any) -> Any:
        return tuple(block(*inputs))

    try:
        compiled = strategy.run(step, arguments)
    except (DivergentCollectiveError, NotImplementedError):
        pytest.skip("this program is refused when it is traced")
    try:
        with jaxdist.config.run_eagerly():
            eager = strategy.run(step, arguments)
    except ValueError as error:
        if not any("Run this step compiled" in note for note in error.__notes__):
            raise
        pytest.skip("the program has a scan without turns")
    text = "\n".join(block.lines())
    for number, (a, b) in enumerate(zip(compiled, eager, strict=True)):
        # Values stay within 2, and rounding grows in loops.
        np.testing.assert_allclose(
            _rows(a, 8), _rows(b, 8), rtol=0, atol=0.05, err_msg=f"result {number}\n{text}"
        )
        if not isinstance(a, jaxdist.PerReplica):
            assert not isinstance(b, jaxdist.PerReplica), f"result {number}\n{text}"
