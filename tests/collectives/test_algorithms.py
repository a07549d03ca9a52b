"""Every all-reduce algorithm, against NumPy, and against its formula."""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _mesh, hlo
from jaxdist._called import called
from jaxdist._collectives.algorithms.algorithm import Algorithm, group_all, split
from jaxdist._collectives.algorithms.by_name import NAMES, make_algorithm
from jaxdist._collectives.algorithms.one_level import HalvingDoubling
from jaxdist._collectives.sums.packing import Entry
from jaxdist.errors import ArgumentError
from tests.tables import sampled

# No algorithm looks at the dtype, so only one dtype comes in every size. Booleans are counted:
# they are int32 by the time that they are summed.
CASES = [
    ("float32", 1),
    ("float32", 7),
    ("float32", 1024),
    ("float32", 1_000_003),
    ("bfloat16", 7),
    ("bfloat16", 1024),
    ("float16", 7),
    ("int32", 7),
    ("int32", 1024),
]
COUNTS = [2, 3, 4, 6, 8]
EVERY = [*NAMES, "rechd"]


@called("test")
def _algorithm(name: str, count: int) -> Algorithm:
    if name == "rechd":
        return HalvingDoubling()
    # Workers of two where there are several, so that both levels have something to do.
    local = 2 if count % 2 == 0 and count > 2 else count
    return make_algorithm(name, local=local, platform="cpu")


def _mapped(fn: Any, count: int) -> tuple[Any, _mesh.ReplicaMesh]:
    layout = _mesh.build(jax.devices()[:count])
    rows = layout.replica_spec
    program = jax.shard_map(fn, mesh=layout.mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return jax.jit(program), layout


def _values(dtype: str, count: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    if dtype == "int32":
        return rng.integers(-(2**30), 2**30, (count, size)).astype(np.int32)
    return np.asarray(jnp.asarray(rng.normal(size=(count, size)), dtype))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", sampled(EVERY, 5))
@pytest.mark.slow
def test_every_replica_gets_the_bits_of_one_sum(name: str, count: int) -> None:
    given = [_values(d, count, s) for d, s in CASES]
    algorithm = _algorithm(name, count)

    def each(*rows: jax.Array) -> list[jax.Array]:
        level = group_all(layout)
        return [algorithm.all_reduce(x[0], level)[None] for x in rows]

    program, layout = _mapped(each, count)
    results = program(*(jax.device_put(x, layout.per_replica) for x in given))
    for (dtype, size), x, result in zip(CASES, given, results, strict=True):
        rows = np.asarray(result)
        assert rows.shape == (count, size)
        assert all(r.tobytes() == rows[0].tobytes() for r in rows), (dtype, size)
        if x.dtype.kind == "i":
            np.testing.assert_array_equal(rows[0], x.sum(0, dtype=np.int32))
            continue
        wide = x.astype(np.float64)
        # n roundings of numbers that are at most the sum of what is added.
        bound = count * float(jnp.finfo(dtype).eps) * np.abs(wide).sum(0)
        assert np.all(np.abs(rows[0].astype(np.float64) - wide.sum(0)) <= bound), (dtype, size)


@pytest.mark.parametrize("count", [3, 8])
def test_small_vectors_of_every_dtype_are_summed_in_shards_too(count: int) -> None:
    cases = [("float32", 1), *((d, 7) for d in ("bfloat16", "int32", "complex64"))]
    given = [_values(d, count, s) for d, s in cases]

    def each(*rows: jax.Array) -> list[list[jax.Array]]:
        level = group_all(layout)
        return [
            [Entry(_algorithm(n, count), 3).all_reduce(x[0], level)[None] for x in rows]
            for n in EVERY
        ]

    program, layout = _mapped(each, count)
    for name, results in zip(
        EVERY, program(*(jax.device_put(x, layout.per_replica) for x in given)), strict=True
    ):
        for (dtype, _), x, result in zip(cases, given, results, strict=True):
            rows = np.asarray(result)
            assert all(r.tobytes() == rows[0].tobytes() for r in rows)
            wide = x.astype({"complex64": np.complex128, "int32": np.int32}.get(dtype, np.float64))
            half = dtype in ("bfloat16", "float16")
            np.testing.assert_allclose(
                rows[0].astype(wide.dtype),
                wide.sum(0, dtype=wide.dtype),
                rtol=0.05 if half else 1e-5,
                atol=0.05 if half else 1e-5,
                err_msg=f"{name} {dtype}",
            )


@pytest.mark.parametrize("name", EVERY)
def test_with_more_places_than_elements_nothing_is_lost(name: str) -> None:
    def each(x: jax.Array) -> jax.Array:
        return _algorithm(name, 8).all_reduce(x[0], group_all(layout))[None]

    program, layout = _mapped(each, 8)
    x = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    result = program(jax.device_put(x, layout.per_replica))
    np.testing.assert_array_equal(result, np.tile(x.sum(0), (8, 1)))


def _formula(name: str, n: int, local: int) -> dict[str, int]:
    """Return the number of collectives of each kind in an all-reduce of one vector."""
    if name in ("pscpu", "psgpu"):
        return {"collective-permute": 2 * math.ceil(math.log2(n))}
    if name == "nccl":
        return {"all-reduce": 1}
    if name == "xring":
        return {"collective-permute": 2 * (n - 1)}
    if name == "rechd":
        core = 1 << (n.bit_length() - 1)
        return {"collective-permute": 2 * int(math.log2(core)) + (2 if core < n else 0)}
    inner, _, outer = name.partition("/")
    if local == n:
        return {"all-reduce": 1} if inner == "nccl" else _formula(inner, n, n)
    halves = {"nccl": "reduce-scatter", "pscpu": "all-to-all"}
    return Counter(_formula(outer, n // local, 1)) + Counter({halves[inner]: 1, "all-gather": 1})


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", EVERY)
def test_the_compiled_program_has_the_collectives_of_the_formula(name: str, count: int) -> None:
    algorithm = _algorithm(name, count)
    local = 2 if count % 2 == 0 and count > 2 else count

    def each(x: jax.Array) -> jax.Array:
        return algorithm.all_reduce(x[0], group_all(layout))[None]

    program, layout = _mapped(each, count)
    shape = jax.ShapeDtypeStruct((count, 960), np.float32, sharding=layout.per_replica)
    text = program.lower(shape).compile().as_text()
    found = hlo.collectives(text)
    assert Counter(c.kind for c in found) == _formula(name, count, local)
    total = 960 * 4
    if name == "xring":
        assert {c.bytes_per_device for c in found} == {total // count}
    if "/" in name and local < count:
        # What goes between workers is the part of one replica.
        within = {frozenset(range(i, i + local)) for i in range(0, count, local)}
        across = [c for c in found if not all(any(set(g) <= w for w in within) for g in c.groups)]
        assert across
        if name == "nccl/rechd":
            # In halves of halves, all together the part and the part again.
            sent = sum(c.bytes_sent for c in across)
            core = 1 << ((count // local).bit_length() - 1)
            around = 2 * total // local if core < count // local else 0
            assert sent == 2 * (core - 1) / core * total // local + around
        elif name == "nccl/xring":
            workers = count // local
            sent = sum(c.bytes_sent for c in across)
            assert sent == 2 * (workers - 1) * total // local // workers
        else:
            assert {c.bytes_per_device for c in across} == {total // local}


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["nccl", "xring", "pscpu/pscpu", "nccl/rechd"])
def test_shards_are_as_many_all_reduces(name: str, shards: int) -> None:
    def each(x: jax.Array) -> jax.Array:
        level = group_all(layout)
        return Entry(_algorithm(name, 4), shards).all_reduce(x[0], level)[None]

    program, layout = _mapped(each, 4)
    shape = jax.ShapeDtypeStruct((4, 4096), np.float32, sharding=layout.per_replica)
    found = hlo.collectives(program.lower(shape).compile().as_text())
    one = _formula(name, 4, 2)
    assert Counter(c.kind for c in found) == {k: v * shards for k, v in one.items()}


def test_levels_divide_replicas_into_workers_and_ranks() -> None:
    six = group_all(_mesh.build(jax.devices()[:6]))
    within, across = split(six, 2)
    assert within.groups == ((0, 1), (2, 3), (4, 5))
    assert across.groups == ((0, 2, 4), (1, 3, 5))
    with pytest.raises(ArgumentError, match=r"got 6 replicas, with 4 for each worker"):
        split(six, 4)


@called("test")
def test_an_unknown_name_is_refused_with_the_eight_that_there_are() -> None:
    with pytest.raises(ArgumentError) as raised:
        make_algorithm("ring", local=1, platform="cpu")
    assert all(repr(name) in str(raised.value) for name in NAMES)
    assert len(NAMES) == 8


def test_a_ring_of_many_is_a_loop_and_not_as_many_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jaxdist._collectives.algorithms.one_level.MAX_UNROLLED", 2)

    def each(x: jax.Array) -> jax.Array:
        return _algorithm("xring", 8).all_reduce(x[0], group_all(layout))[None]

    program, layout = _mapped(each, 8)
    x = jax.device_put(np.arange(80.0, dtype=np.float32).reshape(8, 10), layout.per_replica)
    np.testing.assert_array_equal(np.asarray(program(x))[3], np.asarray(x).sum(0))
    assert len(hlo.collectives(program.lower(x).compile().as_text())) == 2


def test_replicas_may_lie_over_two_axes_in_either_order() -> None:
    devices = np.asarray(jax.devices(), dtype=object).reshape(2, 4)
    for axes in (("a", "b"), ("b", "a")):
        layout = _mesh.adopt(jax.sharding.Mesh(devices, ("a", "b")), axes)

        def each(x: jax.Array, layout: _mesh.ReplicaMesh = layout) -> list[jax.Array]:
            return [_algorithm(n, 8).all_reduce(x[0], group_all(layout))[None] for n in EVERY]

        program = jax.jit(
            jax.shard_map(
                each,
                mesh=layout.mesh,
                in_specs=layout.replica_spec,
                out_specs=layout.replica_spec,
                check_vma=False,
            )
        )
        x = np.arange(40.0, dtype=np.float32).reshape(8, 5)
        placed = jax.device_put(x, NamedSharding(layout.mesh, PartitionSpec(axes)))
        for result in program(placed):
            np.testing.assert_array_equal(result, np.tile(x.sum(0), (8, 1)))
