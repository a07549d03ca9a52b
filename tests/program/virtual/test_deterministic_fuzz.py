"""Random programs have the same bits on 1, 2, 4 and 8 devices, and the right values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist.errors import DivergentCollectiveError
from tests.program.oracle.random_programs import Block, draw
from tests.program.proof.test_replication_fuzz import (
    LENGTH,
    NUM_MIRRORED,
    NUM_PER_REPLICA,
    inputs_of,
)
from tests.program.virtual.test_deterministic import virtual

pytestmark = pytest.mark.optimized

AXES = (("replica", 8),)
# One program has several of them, since compiling takes most of the time.
PROGRAMS_IN_A_BATCH = 3


def _arguments(seed: int) -> list[Any]:
    mirrored, own = inputs_of(seed)
    return [*mirrored, *[jaxdist.PerReplica(list(x)) for x in own]]


def _accepted(strategy: jaxdist.Strategy, seeds: Sequence[int]) -> dict[int, Block]:
    """Return the first programs whose collectives all replicas are proved to reach."""
    found: dict[int, Block] = {}
    for seed in seeds:
        block = draw(seed, AXES, NUM_MIRRORED + NUM_PER_REPLICA, LENGTH)

        def step(*inputs: Any, block: Block = block) -> Any:
            return tuple(block(*inputs))

        try:
            strategy.lower(step, tuple(_arguments(seed)))
        except (DivergentCollectiveError, NotImplementedError):
            continue
        found[seed] = block
        if len(found) == PROGRAMS_IN_A_BATCH:
            break
    return found


def _rows(value: Any) -> np.ndarray:
    return np.asarray(value.array if isinstance(value, jaxdist.PerReplica) else value)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("batch", range(1))
def test_random_programs_have_the_same_bits_on_every_number_of_devices(batch: int) -> None:
    ordinary = jaxdist.MirroredStrategy()
    first = 20_000 + 100 * batch
    blocks = _accepted(ordinary, range(first, first + 100))
    assert len(blocks) == PROGRAMS_IN_A_BATCH
    given = ({seed: _arguments(seed) for seed in blocks},)

    def step(inputs: Any) -> Any:
        return {seed: tuple(block(*inputs[seed])) for seed, block in blocks.items()}

    expected = ordinary.run(step, given)
    results = {devices: virtual(devices).run(step, given) for devices in (1, 2, 4, 8)}
    near = count = 0
    for seed, block in blocks.items():
        for number, one in enumerate(results[1][seed]):
            name = f"seed {seed}, result {number}\n" + "\n".join(block.lines())
            for devices in 2, 4, 8:
                other = _rows(results[devices][seed][number])
                assert other.tobytes() == _rows(one).tobytes(), f"{devices} devices, {name}"
            ordinarily = expected[seed][number]
            assert isinstance(one, jaxdist.PerReplica) == isinstance(
                ordinarily, jaxdist.PerReplica
            ), name
            count += 1
            near += bool(np.allclose(_rows(one), _rows(ordinarily), rtol=0, atol=0.05))
    # A sum that is rounded in another way may choose another branch, or another random key.
    assert near > 0.9 * count
