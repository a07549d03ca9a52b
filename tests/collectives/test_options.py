"""Communication options: what they may be, and the packs that they make."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdist
from jaxdist import PerReplica, Strategy, get_replica_context
from jaxdist._collectives import plan_packs
from jaxdist.errors import ArgumentError, ArgumentTypeError
from jaxdist.experimental import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from tests.strategies.oracle import refused


@pytest.fixture
def two() -> Strategy:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def test_options_have_the_documented_fields_and_defaults() -> None:
    options = CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert options.implementation is CommunicationImplementation.AUTO
    assert [m.value for m in CommunicationImplementation] == ["AUTO", "RING", "NCCL"]
    given = CommunicationOptions(5, 1.0, "ring")
    assert given.implementation is CommunicationImplementation.RING
    nccl = CommunicationImplementation.NCCL
    assert given.merged(CommunicationOptions(7, 2.0, nccl)) == CommunicationOptions(7, 2.0, nccl)
    assert given.merged(CommunicationOptions()) == given


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_per_pack": -1},
        {"timeout_seconds": 0},
        {"timeout_seconds": -5.0},
        {"implementation": "mpi"},
        {"implementation": None},
    ],
)
def test_values_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        CommunicationOptions(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_per_pack": None},
        {"bytes_per_pack": "1"},
        {"bytes_per_pack": 1.5},
        {"timeout_seconds": "1"},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": True},
    ],
)
def test_what_is_no_number_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        CommunicationOptions(**wrong)


def test_what_are_no_options_cannot_be_merged() -> None:
    later: Any = {"bytes_per_pack": 5}
    with refused(
        ArgumentTypeError,
        "CommunicationOptions.merged was given later={'bytes_per_pack': 5}",
        "Pass for instance CommunicationOptions(",
    ):
        CommunicationOptions().merged(later)


def test_the_older_name_says_which_the_newer_one_is() -> None:
    with pytest.warns(DeprecationWarning, match="CommunicationOptions"):
        hints = CollectiveHints(bytes_per_pack=50 * 1024 * 1024)
    assert hints == CommunicationOptions(bytes_per_pack=50 * 1024 * 1024)


@pytest.mark.parametrize(
    ("limit", "packs"),
    [
        (1, [[3], [2], [1], [0]]),
        (16, [[3, 2], [1, 0]]),
        (17, [[3, 2], [1, 0]]),
        (32, [[3, 2, 1], [0]]),
        (100, [[3, 2, 1, 0]]),
    ],
)
def test_a_pack_is_closed_when_it_has_exceeded_the_limit(
    limit: int, packs: list[list[int]]
) -> None:
    assert plan_packs([(4, "f4"), (16, "f4"), (16, "f4"), (16, "f4")], limit) == packs


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["f4", "i4"])), max_size=20),
    st.integers(1, 60),
)
def test_every_leaf_is_in_one_pack_of_one_dtype(sizes: list[tuple[int, str]], limit: int) -> None:
    packs = plan_packs(sizes, limit)
    assert sorted(i for pack in packs for i in pack) == list(range(len(sizes)))
    for pack in packs:
        assert len({sizes[i][1] for i in pack}) == 1
        assert sum(sizes[i][0] for i in pack[:-1]) <= limit


def _gradients(x: Any) -> list[Any]:
    return [x * (i + 1) for i in range(6)] + [(x * 10).astype(jnp.int32)]


@pytest.mark.parametrize(("bytes_per_pack", "count"), [(0, 2), (1, 7), (40, 4), (1 << 20, 2)])
def test_the_packs_survive_in_the_compiled_program(bytes_per_pack: int, count: int) -> None:
    strategy = jaxdist.MirroredStrategy()
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)

    def step(x: Any) -> Any:
        return get_replica_context().all_reduce("sum", _gradients(x), options=options)

    x = PerReplica([np.full(8, r + 1, np.float32) for r in range(8)])
    compiled = strategy.lower(step, (x,)).compile()
    found = [c for c in compiled.collectives if c.kind == "all-reduce"]
    # XLA puts leaves of one dtype together, and those of 0 bytes per pack only.
    assert len(found) in ((count,) if bytes_per_pack else (1, count))
    assert sum(c.operands for c in found) == (7 if bytes_per_pack else 2)
    for have, want in zip(strategy.run(step, (x,)), _gradients(np.full(8, 36.0)), strict=True):
        np.testing.assert_allclose(have, want)


def test_packs_are_differentiated_and_run_op_by_op(two: Strategy) -> None:
    options = CommunicationOptions(bytes_per_pack=1)

    def step(x: Any) -> Any:
        def loss(x: Any) -> Any:
            a, b = get_replica_context().all_reduce("mean", [x, x**2], options)
            return (a * b).sum()

        return jax.grad(loss)(x)

    x = PerReplica([np.float32(1), np.float32(3)])
    compiled = two.run(step, (x,))
    with jaxdist.config.run_eagerly():
        eager = two.run(step, (x,))
    np.testing.assert_allclose(compiled.values, eager.values, rtol=1e-6)


def test_the_example_of_the_documentation_runs(two: Strategy) -> None:
    optimizer = optax.sgd(0.1)

    def step(params: Any, state: Any, x: Any) -> Any:
        with pytest.warns(DeprecationWarning, match="older name"):
            hints = CollectiveHints(bytes_per_pack=50 * 1024 * 1024)
        grads = jax.grad(lambda p: (p["w"] * x).sum() + p["b"])(params)
        grads = get_replica_context().all_reduce("sum", grads, experimental_hints=hints)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones(2), "b": jnp.zeros(())}
    x = PerReplica([np.ones(2, np.float32), np.ones(2, np.float32) * 2])
    params, _ = two.run(step, (params, optimizer.init(params), x))
    np.testing.assert_allclose(params["w"], [0.7, 0.7], rtol=1e-6)
    np.testing.assert_allclose(params["b"], -0.2, rtol=1e-6)


def test_options_of_a_subclass_with_fields_of_its_own_are_merged() -> None:
    @dataclasses.dataclass(frozen=True)
    class Labelled(CommunicationOptions):
        label: str = ""

    merged = CommunicationOptions(5, 1.0).merged(Labelled(bytes_per_pack=7, label="x"))
    assert merged == CommunicationOptions(bytes_per_pack=7, timeout_seconds=1.0)


def test_what_has_no_effect_is_said_once(
    two: Strategy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxdist._collectives.options._LOGGED", set())
    options = CommunicationOptions(1, 120.0, "nccl")
    v = PerReplica([1.0, 2.0])
    with caplog.at_level(logging.INFO, "jaxdist"):
        for _ in range(2):
            try:
                assert float(two.reduce("sum", v, axis=None, experimental_hints=options)) == 3.0
            except jaxdist.errors.DeadlineExceededError:
                pytest.fail("nothing was waited for")
    told = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    fields = ["bytes_per_pack", "timeout_seconds", "implementation"]
    assert [next(f for f in fields if f in t) for t in told] == fields
