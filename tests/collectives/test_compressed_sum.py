"""Compressed sums across workers, whose rounding errors are added to the next sum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist import _mesh, hlo
from jaxdist._called import called
from jaxdist._collectives import CompressedSum, RoundingErrors, find_compression
from jaxdist.errors import ArgumentError
from tests.strategies.oracle import refused
from tests.tables import examples

NAMES = ["bf16", "int8"]


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1.0, 1e30]), st.sampled_from(NAMES))
@called("test")
def test_a_code_is_as_near_as_its_steps(seed: int, size: float, name: str) -> None:
    rows = np.random.default_rng(seed).normal(size=(2, 512)).astype(np.float32) * np.float32(size)
    how = find_compression(name)
    kept = np.asarray(how.decode(how.encode(jnp.asarray(rows))))
    if name == "int8":
        largest = np.abs(rows.reshape(2, 2, 256)).max(-1, keepdims=True)
        bound = np.broadcast_to(largest / 127 * 0.5001, (2, 2, 256)).reshape(2, 512)
    else:
        bound = np.abs(rows) * 2.0**-8
    assert np.all(np.abs(kept - rows) <= bound)


@called("test")
def test_zeros_stay_zeros_and_codes_have_fewer_bytes() -> None:
    for name, expected in (("bf16", 1024), ("int8", 512 + 8)):
        how = find_compression(name)
        code = how.encode(jnp.zeros((1, 512)))
        assert code.nbytes == expected
        assert not np.any(how.decode(code))


@called("test")
def _program(name: str, count: int, local: int) -> tuple[Any, CompressedSum]:
    layout = _mesh.build(jax.devices()[:count])
    how = CompressedSum(find_compression(name), layout, local)

    def each(x: jax.Array, given: jax.Array, summed: jax.Array) -> Any:
        total, errors = how(x[0], RoundingErrors(given[0], summed[0]))
        return total[None], errors.given[None], errors.summed[None]

    rows = layout.replica_spec
    mapped = jax.shard_map(each, mesh=layout.mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return jax.jit(mapped), how


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("count", "local"), [(2, 1), (4, 2), (6, 2), (8, 1), (8, 4), (3, 3)])
def test_what_is_lost_once_is_sent_later(name: str, count: int, local: int) -> None:
    program, how = _program(name, count, local)
    size = 1000
    x = np.random.default_rng(0).normal(size=(count, size)).astype(np.float32)
    errors = how.no_errors(size)
    state = [np.zeros((count, e.size), np.float32) for e in errors]
    true, sent = np.zeros(size), np.zeros(size)
    first = 0.0
    for step in range(20):
        total, *state = program(x, *state)
        rows = np.asarray(total)
        assert all(r.tobytes() == rows[0].tobytes() for r in rows)
        true += x.sum(0, dtype=np.float64)
        sent += rows[0]
        if step == 0:
            first = np.abs(sent - true).max()
    # Errors do not add up: after 20 steps the sums differ by as much as after one.
    assert np.abs(sent - true).max() <= 3 * first + 1e-4
    if count == local:
        assert first < 1e-5, "one worker has no slow link"
    else:
        assert first > 1e-4


@pytest.mark.parametrize(("name", "fraction"), [("bf16", 1 / 2), ("int8", 1.02 / 4)])
def test_across_workers_go_codes_and_within_them_all_bits(name: str, fraction: float) -> None:
    program, how = _program(name, 8, 4)
    size = 8 * 4096
    rows = how.layout.per_replica
    shapes = [(8, size), *((8, e.size) for e in how.no_errors(size))]
    given = [jax.ShapeDtypeStruct(s, np.float32, sharding=rows) for s in shapes]
    found = hlo.collectives(program.lower(*given).compile().as_text())
    workers = [set(range(4)), set(range(4, 8))]
    across = [c for c in found if not any(set(c.groups[0]) <= w for w in workers)]
    within = [c for c in found if c not in across]
    assert [c.kind for c in within] == ["reduce-scatter", "all-gather"]
    assert {c.kind for c in across} == {"all-to-all", "all-gather"}
    # Half of the codes of a part goes out, the other half comes back summed.
    part = size * 4 / 4
    assert sum(c.bytes_sent for c in across) == pytest.approx(part * fraction, rel=0.01)


@called("test")
def test_an_unknown_compression_is_refused() -> None:
    with refused(ArgumentError, "'int4'", "'bf16', 'int8'"):
        find_compression("int4")
