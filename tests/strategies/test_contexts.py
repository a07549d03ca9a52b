"""Where the caller is: outside, in a scope, in a replica, in a merge function."""

import concurrent.futures
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import MirroredStrategy, OneDeviceStrategy, PerReplica, ReplicaContext, Strategy
from jaxdist.errors import ArgumentTypeError, ContextError, MixedStrategyError
from tests.strategies.oracle import refused, where


def _is_default(strategy: Strategy) -> bool:
    return type(strategy).__name__ == "DefaultStrategy"


# The table


def test_outside_every_strategy_the_default_one_is_current_and_there_is_replica_0() -> None:
    strategy, has, context, cross = where()
    assert strategy is jaxdist.get_strategy()
    assert strategy.num_replicas_in_sync == 1
    assert not has
    assert not cross
    assert isinstance(context, ReplicaContext)
    assert context.strategy is strategy
    assert context.num_replicas_in_sync == 1
    assert type(context.replica_id_in_sync_group) is int
    assert context.replica_id_in_sync_group == 0


def test_in_a_scope_the_strategy_is_current_and_there_is_no_replica(strategy: Strategy) -> None:
    if _is_default(strategy):
        with strategy.scope() as entered:
            assert entered is strategy
            assert not jaxdist.has_strategy()
            assert not jaxdist.in_cross_replica_context()
        return
    with strategy.scope() as entered:
        assert entered is strategy
        assert where() == (strategy, True, None, True)


def test_in_a_step_the_strategy_is_current_and_there_is_a_replica(strategy: Strategy) -> None:
    seen = []
    strategy.run(lambda: seen.append(where()))
    [(current, has, context, cross)] = seen
    assert current is strategy
    assert has is not _is_default(strategy)
    assert isinstance(context, ReplicaContext)
    assert context.strategy is strategy
    assert not cross


def test_in_a_merge_function_the_strategy_is_current_and_there_is_no_replica(
    strategy: Strategy,
) -> None:
    seen = []

    def merge(given: Strategy) -> None:
        assert given is strategy
        seen.append(where())

    def step() -> None:
        before = where()
        jaxdist.get_replica_context().merge_call(merge)
        assert where() == before

    strategy.run(step)
    assert seen == [(strategy, not _is_default(strategy), None, True)]


def test_after_a_scope_the_default_strategy_is_current_again(strategy: Strategy) -> None:
    before = where()
    with strategy.scope():
        pass
    assert where() == before


def test_after_a_step_the_context_is_that_of_before(strategy: Strategy) -> None:
    with strategy.scope():
        before = where()
        strategy.run(lambda: None)
        assert where() == before


def test_a_scope_that_is_left_by_an_exception_is_left(strategy: Strategy) -> None:
    before = where()
    with pytest.raises(ZeroDivisionError), strategy.scope():
        _ = 1 / 0
    assert where() == before


def test_a_step_that_raises_leaves_the_context_as_it_was(strategy: Strategy) -> None:
    def step() -> float:
        return 1 / 0

    before = where()
    with pytest.raises(ZeroDivisionError):
        strategy.run(step)
    assert where() == before


def test_a_merge_function_that_raises_leaves_the_context_as_it_was(strategy: Strategy) -> None:
    def step() -> None:
        inside = where()
        with pytest.raises(ZeroDivisionError):
            jaxdist.get_replica_context().merge_call(lambda _: 1 / 0)
        assert where() == inside

    before = where()
    strategy.run(step)
    assert where() == before


@pytest.mark.parametrize(
    "function",
    [
        jaxdist.get_strategy,
        jaxdist.has_strategy,
        jaxdist.get_replica_context,
        jaxdist.in_cross_replica_context,
    ],
    ids=lambda f: f.__name__,
)
def test_the_questions_about_the_context_take_no_arguments(function: Callable[[], Any]) -> None:
    assert not inspect.signature(function).parameters


def test_the_default_strategys_scope_has_the_default_replica_context() -> None:
    outside = jaxdist.get_replica_context()
    with jaxdist.get_strategy().scope():
        assert jaxdist.get_replica_context() is outside


# Scopes


def test_a_scope_can_be_entered_again_within_itself(strategy: Strategy) -> None:
    with strategy.scope():
        outer = where()
        with strategy.scope():
            with strategy.scope() as third:
                assert third is strategy
                assert where() == outer
            assert where() == outer
        assert where() == outer


def test_scopes_of_different_strategies_do_not_nest() -> None:
    first, second = MirroredStrategy(["cpu:0", "cpu:1"]), OneDeviceStrategy("cpu:2")
    with first.scope():
        with (
            refused(
                MixedStrategyError,
                "OneDeviceStrategy.scope was called in the cross-replica context of Mirrored",
                "Leave the scope of that MirroredStrategy first",
                "experimental_set_strategy(None)",
            ),
            second.scope(),
        ):
            pass
        assert jaxdist.get_strategy() is first


def test_two_strategies_of_one_class_do_not_nest_either() -> None:
    first, second = MirroredStrategy(), MirroredStrategy()
    said = ("MirroredStrategy.scope", "Two strategies were made with the same arguments")
    with first.scope(), refused(MixedStrategyError, *said), second.scope():
        pass
    few = MirroredStrategy(["cpu:0", "cpu:1"])
    with first.scope(), refused(MixedStrategyError, repr(few), repr(first)), few.scope():
        pass


def test_one_scope_object_can_be_entered_several_times(strategy: Strategy) -> None:
    scope = strategy.scope()
    for _ in range(2):
        with scope as entered, scope:
            assert entered is strategy
            assert jaxdist.get_strategy() is strategy
        assert not jaxdist.has_strategy()


def test_a_scope_that_was_refused_can_be_entered_later() -> None:
    first, second = MirroredStrategy(), MirroredStrategy(["cpu:0"])
    scope = second.scope()
    with first.scope(), refused(MixedStrategyError, "scope"), scope:
        pass
    with scope:
        assert jaxdist.get_strategy() is second


def test_the_default_strategys_scope_is_refused_in_another_scope() -> None:
    default = jaxdist.get_strategy()
    with MirroredStrategy().scope(), refused(MixedStrategyError, "do not mix"), default.scope():
        pass


def test_a_scope_in_the_default_strategys_scope_is_allowed(strategy: Strategy) -> None:
    with jaxdist.get_strategy().scope(), strategy.scope():
        assert jaxdist.get_strategy() is strategy


def test_the_scope_of_the_same_strategy_is_refused_in_a_step(strategy: Strategy) -> None:
    def step() -> None:
        if _is_default(strategy):
            # The default strategy's scope changes nothing anywhere.
            with strategy.scope() as entered:
                assert entered is jaxdist.get_strategy()
            return
        with refused(ContextError, "inside a replica", "outside strategy.run"), strategy.scope():
            pass

    strategy.run(step)


def test_the_scope_of_another_strategy_is_refused_in_a_step() -> None:
    other = OneDeviceStrategy("cpu:0")

    def step() -> None:
        with refused(MixedStrategyError, "inside a replica"), other.scope():
            pass

    MirroredStrategy().run(step)


def test_arrays_made_in_a_scope_lie_on_the_first_device_of_the_strategy_here(
    strategy: Strategy,
) -> None:
    with strategy.scope():
        made = jnp.ones(3)
    here = [d for d in strategy.mesh.devices.flat if d.process_index == jax.process_index()]
    assert made.devices() == {here[0]}


def test_scopes_are_those_of_one_thread() -> None:
    strategy = MirroredStrategy()
    with strategy.scope(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(jaxdist.has_strategy).result()
        assert jaxdist.has_strategy()
    assert not other


def test_two_threads_can_each_be_in_a_scope_of_their_own() -> None:
    meet = threading.Barrier(2, timeout=30)

    def in_scope(strategy: Strategy) -> bool:
        with strategy.scope():
            meet.wait()
            mine = jaxdist.get_strategy() is strategy
            meet.wait()
            return mine

    strategies = [MirroredStrategy(), OneDeviceStrategy("cpu:1")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(in_scope, strategies)) == [True, True]


# experimental_set_strategy


@pytest.fixture
def ambient() -> Any:
    """`experimental_set_strategy`, cleared afterwards."""
    yield jaxdist.experimental_set_strategy
    jaxdist.experimental_set_strategy(None)


def test_an_ambient_strategy_is_current_without_a_scope(
    strategy: Strategy, ambient: Callable[..., None]
) -> None:
    ambient(strategy)
    if _is_default(strategy):
        assert not jaxdist.has_strategy()
    else:
        assert where() == (strategy, True, None, True)
    ambient(None)
    assert not jaxdist.has_strategy()
    assert jaxdist.get_replica_context().replica_id_in_sync_group == 0


def test_an_ambient_strategy_is_replaced_by_the_next(ambient: Callable[..., None]) -> None:
    first, second = MirroredStrategy(), OneDeviceStrategy("cpu:1")
    ambient(first)
    ambient(second)
    assert jaxdist.get_strategy() is second


def test_an_ambient_strategy_is_that_of_the_whole_process(ambient: Callable[..., None]) -> None:
    strategy = MirroredStrategy()
    ambient(strategy)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(jaxdist.get_strategy).result() is strategy


@pytest.mark.parametrize("which", ["the same", "another", "None"])
def test_setting_a_strategy_inside_a_scope_is_refused(which: str) -> None:
    strategy = MirroredStrategy()
    given = {"the same": strategy, "another": OneDeviceStrategy("cpu:0"), "None": None}[which]
    with strategy.scope():
        with refused(
            ContextError,
            "experimental_set_strategy was called in the cross-replica context of MirroredStrategy",
            "outside every `with strategy.scope():`",
        ):
            jaxdist.experimental_set_strategy(given)
        assert jaxdist.get_strategy() is strategy
    assert not jaxdist.has_strategy()


def test_setting_a_strategy_inside_a_step_is_refused() -> None:
    def step() -> None:
        with refused(ContextError, "inside a replica"):
            jaxdist.experimental_set_strategy(None)

    MirroredStrategy().run(step)


def test_setting_what_is_no_strategy_is_refused() -> None:
    with refused(jaxdist.errors.JaxdistError, "experimental_set_strategy was given", "of type str"):
        jaxdist.experimental_set_strategy("mirrored")  # type: ignore[arg-type]
    assert not jaxdist.has_strategy()


def test_the_scope_of_another_strategy_than_the_ambient_one_is_refused(
    ambient: Callable[..., None],
) -> None:
    ambient(MirroredStrategy())
    other = OneDeviceStrategy("cpu:1")
    with refused(MixedStrategyError, "experimental_set_strategy(None)"), other.scope():
        pass
    with refused(MixedStrategyError, "OneDeviceStrategy.run"):
        other.run(lambda: 1)


def test_the_ambient_strategy_runs_reduces_and_enters_its_own_scope(
    ambient: Callable[..., None],
) -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    ambient(strategy)
    with strategy.scope():
        assert jaxdist.get_strategy() is strategy
    ids = strategy.run(lambda: jaxdist.get_replica_context().replica_id_in_sync_group)
    assert int(strategy.reduce("SUM", ids, axis=None)) == 1


# Calls that belong on the other side

ACROSS: dict[str, tuple[Callable[[Strategy], Any], str]] = {
    "run": (lambda s: s.run(lambda: 1), "call the function itself: fn(*args)"),
    "lower": (lambda s: s.lower(lambda: 1), "call the function itself: fn(*args)"),
    "reduce": (lambda s: s.reduce("SUM", 0, axis=None), "get_replica_context().all_reduce"),
    "gather": (lambda s: s.gather(0, axis=0), "get_replica_context().all_gather"),
    "extended.reduce_to": (
        lambda s: s.extended.reduce_to("SUM", 0, "cpu:0"),
        "get_replica_context().all_reduce",
    ),
    "extended.batch_reduce_to": (
        lambda s: s.extended.batch_reduce_to("SUM", [(0, "cpu:0")]),
        "get_replica_context().all_reduce",
    ),
    "extended.broadcast_to": (lambda s: s.extended.broadcast_to(0, "cpu:0"), "merge_call"),
    "extended.call_for_each_replica": (
        lambda s: s.extended.call_for_each_replica(lambda: 1),
        "call the function itself: fn(*args)",
    ),
    "experimental_distribute_values_from_function": (
        lambda s: s.experimental_distribute_values_from_function(lambda ctx: 1),
        "before strategy.run",
    ),
    "experimental_distribute_dataset": (
        lambda s: s.experimental_distribute_dataset([np.ones(8)]),
        "before strategy.run",
    ),
    "distribute_datasets_from_function": (
        lambda s: s.distribute_datasets_from_function(lambda ctx: [np.ones(8)]),
        "before strategy.run",
    ),
}


@pytest.mark.parametrize("name", ACROSS)
def test_a_cross_replica_call_inside_a_replica_says_where_it_belongs(name: str) -> None:
    call, remedy = ACROSS[name]

    def step() -> None:
        with refused(
            ContextError,
            "was called inside a replica, in a function run by MirroredStrategy.run",
            "It is a method of the cross-replica context",
            remedy,
        ):
            call(jaxdist.get_strategy())

    MirroredStrategy(["cpu:0", "cpu:1"]).run(step)


@pytest.mark.parametrize("name", ACROSS)
def test_a_cross_replica_call_under_another_strategys_scope_is_mixing(name: str) -> None:
    strategy, other = MirroredStrategy(["cpu:0", "cpu:1"]), OneDeviceStrategy("cpu:3")
    with other.scope():
        with refused(
            MixedStrategyError,
            "MirroredStrategy.",
            "in the cross-replica context of OneDeviceStrategy",
        ):
            ACROSS[name][0](strategy)
        assert jaxdist.get_strategy() is other


def test_lowering_a_step_in_a_merge_function_is_refused() -> None:
    def merge(strategy: Strategy) -> None:
        with refused(ContextError, "in a merge function of MirroredStrategy"):
            ACROSS["lower"][0](strategy)

    MirroredStrategy().run(lambda: jaxdist.get_replica_context().merge_call(merge))


def test_a_step_in_a_step_of_another_strategy_is_mixing() -> None:
    other = OneDeviceStrategy("cpu:0")

    def step() -> None:
        with refused(MixedStrategyError, "OneDeviceStrategy.run", "inside a replica"):
            other.run(lambda: 1)

    MirroredStrategy().run(step)


IN_REPLICA: dict[str, Callable[[ReplicaContext], Any]] = {
    "replica_id_in_sync_group": lambda c: c.replica_id_in_sync_group,
    "all_reduce": lambda c: c.all_reduce("SUM", 1.0),
    "all_gather": lambda c: c.all_gather(np.ones(1), axis=0),
    "merge_call": lambda c: c.merge_call(lambda s: 1),
}


@pytest.mark.parametrize("given", [None, "MirroredStrategy"])
def test_a_replica_context_of_what_is_no_strategy_is_refused(given: Any) -> None:
    with refused(
        ArgumentTypeError,
        f"ReplicaContext was given strategy={given!r}",
        "Use the context of the running step: jaxdist.get_replica_context()",
    ):
        ReplicaContext(given)


@pytest.mark.parametrize("name", IN_REPLICA)
def test_a_replica_context_that_is_used_after_its_step_says_so(name: str) -> None:
    strategy = MirroredStrategy()
    kept: list[ReplicaContext] = []
    strategy.run(lambda: kept.append(jaxdist.get_replica_context()))
    with refused(ContextError, f"ReplicaContext.{name} was called outside every strategy"):
        IN_REPLICA[name](kept[0])
    with (
        strategy.scope(),
        refused(
            ContextError,
            f"ReplicaContext.{name} was called in the cross-replica context",
            "inside the function that you pass to strategy.run",
        ),
    ):
        IN_REPLICA[name](kept[0])


@pytest.mark.parametrize("name", IN_REPLICA)
def test_a_replica_context_that_is_used_in_another_step_says_so(name: str) -> None:
    strategy = MirroredStrategy()
    kept: list[ReplicaContext] = []
    strategy.run(lambda: kept.append(jaxdist.get_replica_context()))

    def step() -> None:
        with refused(ContextError, "the context of a step that is not running here"):
            IN_REPLICA[name](kept[0])

    strategy.run(step)


@pytest.mark.parametrize("name", IN_REPLICA)
def test_a_replica_context_that_is_used_in_a_merge_function_says_so(name: str) -> None:
    def step() -> None:
        context = jaxdist.get_replica_context()

        def merge(_: Strategy) -> None:
            with refused(ContextError, "in a merge function of MirroredStrategy"):
                IN_REPLICA[name](context)

        context.merge_call(merge)

    MirroredStrategy().run(step)


def test_the_facts_of_a_replica_context_can_be_read_after_its_step(strategy: Strategy) -> None:
    kept: list[ReplicaContext] = []
    strategy.run(lambda: kept.append(jaxdist.get_replica_context()))
    assert kept[0].strategy is strategy
    assert kept[0].num_replicas_in_sync == strategy.num_replicas_in_sync
    assert kept[0].devices == tuple(strategy.extended.worker_devices)
    assert re.fullmatch(rf"ReplicaContext\(\w+, {strategy.num_replicas_in_sync}\)", repr(kept[0]))


# The replica context itself


def test_replica_ids_are_int32_and_count_from_0(strategy: Strategy) -> None:
    ids = strategy.run(lambda: jaxdist.get_replica_context().replica_id_in_sync_group[None])
    got = strategy.gather(ids, axis=0) if isinstance(ids, PerReplica) else ids
    assert got.dtype == jnp.int32
    assert got.tolist() == list(range(strategy.num_replicas_in_sync))


def test_the_replica_id_is_traced_and_not_frozen_in_a_captured_jitted_function() -> None:
    captured = jax.jit(lambda: jaxdist.get_replica_context().replica_id_in_sync_group)
    ids = MirroredStrategy().run(lambda: captured())
    assert [int(v) for v in ids.values] == list(range(8))


def test_the_default_replica_context_gives_everything_back_as_it_is() -> None:
    context = jaxdist.get_replica_context()
    value = np.ones(3)
    assert context.all_reduce("SUM", value) is value
    assert context.all_gather(value, axis=0) is value
    assert context.merge_call(lambda s, x: x, args=(value,)) is value


def test_the_default_replica_context_calls_a_merge_function_with_the_default_strategy() -> None:
    default = jaxdist.get_strategy()
    seen = []

    def merge(strategy: Strategy, a: int, b: int) -> int:
        seen.append((strategy, *where()[1:]))
        return a + b

    context = jaxdist.get_replica_context()
    assert context.merge_call(merge, args=(1,), kwargs={"b": 2}) == 3
    assert seen == [(default, False, None, True)]


def test_the_same_step_runs_with_and_without_a_strategy(strategy: Strategy) -> None:
    def step(x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("mean", x * 2)

    assert float(step(3.0)) == float(strategy.run(step, (3.0,))) == 6.0
