"""The replication analysis never calls a value equal that differs, on random programs."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxdist
from jaxdist._program.compile.build import input_differences, replica_axes_of
from jaxdist._program.proof.replication import analyse
from jaxdist.errors import DivergentCollectiveError
from tests.program.oracle.random_programs import OPERATIONS, SIZE, Block, Instruction, draw
from tests.tables import sampled

MESHES = {
    "one_axis": (("r", 8),),
    "two_axes": (("a", 2), ("b", 4)),
}
NUM_MIRRORED, NUM_PER_REPLICA = 3, 2
LENGTH = 12
PROGRAMS_IN_A_BATCH = 16


def strategy_over(axes: tuple[tuple[str, int], ...]) -> jaxdist.MirroredStrategy:
    shape, names = [n for _, n in axes], [a for a, _ in axes]
    devices = np.asarray(jax.devices()[:8], dtype=object).reshape(shape)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=tuple(names))


@dataclasses.dataclass(frozen=True)
class _Analysed:
    """A program, and for each of its values the axes over which it may differ by the analysis."""

    seed: int
    block: Block
    differs: tuple[frozenset[str], ...]
    kinds: tuple[str, ...]


def inputs_of(seed: int) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(seed)
    mirrored = [rng.normal(size=SIZE).astype(np.float32) for _ in range(NUM_MIRRORED)]
    own = [rng.normal(size=(8, SIZE)).astype(np.float32) for _ in range(NUM_PER_REPLICA)]
    return mirrored, own


def _analysed(strategy: jaxdist.Strategy, seed: int, block: Block) -> _Analysed | None:
    """Return the facts of a program, or None if the analysis rejects a collective."""
    mirrored, own = inputs_of(seed)
    arguments = (*mirrored, *[jaxdist.PerReplica(list(x)) for x in own])

    def step(*inputs: Any) -> Any:
        return tuple(block(*inputs))

    try:
        program = strategy.lower(step, arguments)
    except DivergentCollectiveError:
        return None
    axes = replica_axes_of(strategy.layout)
    inputs = input_differences(program.signature, program.traced, axes)
    found = analyse(program.traced.jaxpr, inputs, axes)
    kinds = tuple(what.split()[0] for what in program.results.values())
    return _Analysed(seed, block, found.outputs, kinds)


def _values_of_all_replicas(
    strategy: jaxdist.Strategy, programs: Sequence[_Analysed]
) -> list[np.ndarray]:
    """Run the programs without any analysis: `[replica, value, ...]` for each."""
    axes = strategy.replica_axes
    given = [inputs_of(p.seed) for p in programs]

    def replica(given: Any) -> Any:
        stacked = []
        for program, (mirrored, own) in zip(programs, given, strict=True):
            values = program.block(*mirrored, *[x[0] for x in own])
            stacked.append(jax.numpy.stack(values)[None])
        return stacked

    specs = ([PartitionSpec()] * NUM_MIRRORED, [PartitionSpec(axes)] * NUM_PER_REPLICA)
    mapped = jax.shard_map(
        replica,
        mesh=strategy.mesh,
        in_specs=([specs] * len(programs),),
        out_specs=PartitionSpec(axes),
        check_vma=False,
    )
    fast = {"xla_llvm_disable_expensive_passes": True, "xla_backend_optimization_level": 0}
    return [np.asarray(x) for x in jax.jit(mapped, compiler_options=fast)(given)]


def _wrong(
    strategy: jaxdist.Strategy, program: _Analysed, values: np.ndarray
) -> list[tuple[int, frozenset[str]]]:
    """Return the values whose bits differ over axes over which the analysis proves them equal."""
    shape = [strategy.mesh.shape[a] for a in strategy.replica_axes]
    bits = values.view(np.uint32).reshape(*shape, *values.shape[1:])
    found = []
    for number, differs in enumerate(program.differs):
        column = np.take(bits, number, axis=len(shape))
        over = frozenset(
            a
            for i, a in enumerate(strategy.replica_axes)
            if (column != np.take(column, [0], axis=i)).any()
        )
        if over - differs:
            found.append((number, over - differs))
    return found


def _really_equal(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return np.asarray((bits == bits[:1]).all(axis=(0, 2)))


@pytest.mark.parametrize("batch", sampled(range(2), 1))
@pytest.mark.parametrize("mesh", list(MESHES))
def test_a_value_that_is_called_equal_has_the_same_bits_on_all_replicas(
    mesh: str, batch: int
) -> None:
    axes = MESHES[mesh]
    strategy = strategy_over(axes)
    seeds = range(1000 * batch, 1000 * batch + 2 * PROGRAMS_IN_A_BATCH)
    drawn = [(s, draw(s, axes, NUM_MIRRORED + NUM_PER_REPLICA, LENGTH)) for s in seeds]
    kept = [p for s, b in drawn if (p := _analysed(strategy, s, b)) is not None]
    kept = kept[:PROGRAMS_IN_A_BATCH]
    assert len(kept) >= PROGRAMS_IN_A_BATCH // 2, "nearly every program was refused"

    proved = equal = different = 0
    for program, values in zip(kept, _values_of_all_replicas(strategy, kept), strict=True):
        wrong = _wrong(strategy, program, values)
        text = "\n".join(program.block.lines())
        assert not wrong, (
            f"seed {program.seed}: results {wrong} are called equal and differ\n{text}"
        )
        assert [bool(d) for d in program.differs] == [k == "per-replica" for k in program.kinds]
        same = _really_equal(values)
        proved += program.kinds.count("mirrored")
        equal += int(same.sum())
        different += int((~same).sum())
    # An analysis that proves nothing would pass, and so would programs whose values never differ.
    assert proved > 0.5 * equal, f"{proved} proved of {equal} that are equal"
    assert different > 0.2 * (equal + different)


def _operations_in(block: Block) -> collections.Counter[str]:
    count: collections.Counter[str] = collections.Counter()
    for instruction in block.instructions:
        count[instruction.op] += 1
        for inner in instruction.blocks:
            count += _operations_in(inner)
    return count


def test_the_random_programs_use_every_kind_of_operation() -> None:
    used: collections.Counter[str] = collections.Counter()
    for axes in MESHES.values():
        for seed in range(200):
            used += _operations_in(draw(seed, axes, NUM_MIRRORED + NUM_PER_REPLICA, LENGTH))
    assert set(used) == set(OPERATIONS)


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("op", ["unheard_of", "pure_callback"])
def test_what_is_not_known_may_differ_in_every_program_that_it_is_put_into(
    op: str, mesh: str
) -> None:
    axes = MESHES[mesh]
    strategy = strategy_over(axes)
    count = 0
    for seed in range(40):
        block = draw(seed, axes, NUM_MIRRORED + NUM_PER_REPLICA, 5)
        # As the first instruction, on a mirrored input; the others come after it.
        unknown = Instruction(op, (0,))
        whole = Block(block.num_inputs, (unknown, *block.instructions), (block.num_inputs,))
        program = _analysed(strategy, seed, whole)
        if program is None:
            continue
        count += 1
        assert program.kinds == ("per-replica",), f"seed {seed}"
        assert program.differs == (frozenset(dict(axes)),), f"seed {seed}"
    assert count > 20


@functools.cache
def _refusals(mesh: str) -> tuple[int, int]:
    axes = MESHES[mesh]
    strategy = strategy_over(axes)
    drawn = [draw(s, axes, NUM_MIRRORED + NUM_PER_REPLICA, LENGTH) for s in range(40)]
    refused = [_analysed(strategy, s, b) is None for s, b in enumerate(drawn)]
    return sum(refused), len(refused)


@pytest.mark.parametrize("mesh", list(MESHES))
def test_some_random_programs_are_refused_and_most_are_not(mesh: str) -> None:
    refused, all_of_them = _refusals(mesh)
    assert 0 < refused < all_of_them * 0.8
