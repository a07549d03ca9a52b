"""JAX's settings of a block hold in the threads that work for it, and only for that work."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import _compat
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ClosureInputError, NotFiniteError
from jaxdist.experimental import rpc
from tests.layouts import make_layout
from tests.parameter_server.strategy.making import make_strategy
from tests.strategies.oracle import refused

# A setting as a block, and its name in `jax.config` with its value there.
SETTINGS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Any]] = {
    "jax_enable_x64": (lambda: jax.enable_x64(True), True),
    "jax_default_matmul_precision": (
        lambda: jax.default_matmul_precision("highest"),
        "highest",
    ),
    "jax_numpy_dtype_promotion": (lambda: jax.numpy_dtype_promotion("strict"), "strict"),
    "jax_numpy_rank_promotion": (lambda: jax.numpy_rank_promotion("warn"), "warn"),
    "jax_default_prng_impl": (lambda: jax.default_prng_impl("rbg"), "rbg"),
    "jax_default_device": (lambda: jax.default_device("cpu"), "cpu"),
    "jax_debug_nans": (lambda: jax.debug_nans(True), True),
    "jax_debug_infs": (lambda: jax.debug_infs(True), True),
    "jax_disable_jit": (lambda: jax.disable_jit(True), True),
}


def _read(name: str) -> Any:
    return getattr(jax.config, name)


def _in_thread(act: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_holds_in_the_block_of_another_thread(name: str) -> None:
    block, value = SETTINGS[name]
    before = _read(name)
    with block():
        settings = _compat.ThreadSettings()

    def read() -> Any:
        with settings.use():
            inside = _read(name)
        return inside, _read(name)

    assert _in_thread(read) == (value, before)
    assert before != value


def test_the_part_of_jax_in_cpp_is_told() -> None:
    with jax.debug_nans(True):
        settings = _compat.ThreadSettings()

    def compute() -> str:
        log = jax.jit(jnp.log)
        log(-1.0)
        try:
            with settings.use():
                log(-1.0)
        except FloatingPointError:
            # Afterwards it is not checked any more.
            return str(log(-1.0))
        return "no error"

    assert _in_thread(compute) == "nan"


def test_a_setting_without_a_block_is_the_global_one_of_later() -> None:
    settings, before = _compat.ThreadSettings(), _read("jax_numpy_rank_promotion")
    try:
        jax.config.update("jax_numpy_rank_promotion", "warn")

        def read() -> Any:
            with settings.use():
                return _read("jax_numpy_rank_promotion")

        assert _in_thread(read) == "warn"
    finally:
        jax.config.update("jax_numpy_rank_promotion", before)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_dataset_is_read_with_the_settings_of_its_reader(name: str) -> None:
    block, value = SETTINGS[name]
    seen: list[Any] = []

    def read() -> Iterator[Any]:
        for _ in range(3):
            seen.append(_read(name))
            yield np.ones(4, "float32")

    options = jaxdist.InputOptions(experimental_per_replica_buffer_size=2)
    with block():
        list(jaxdist.data.distribute_dataset(_Source(read), make_layout(2), options))
    list(jaxdist.data.distribute_dataset(_Source(read), make_layout(2), options))
    assert seen[:3] == [value] * 3
    assert value not in seen[3:]


class _Source:
    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return self._read()


def test_scheduled_functions_have_64_bits_where_they_are_scheduled() -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    third = np.float64(1) / 3
    with jax.enable_x64(True), strategy.scope():
        v = jaxdist.Variable(third)

        def add(x: Any) -> Any:
            v.assign_add(x)
            return v.value(), x * 2

        wide = coordinator.schedule(add, (np.float64(1e-12),))
        whole = coordinator.schedule(lambda x: x + 1, (np.int64(2**40),))
    narrow = coordinator.schedule(lambda x: x * 2, (third,))
    coordinator.join()
    value, doubled = wide.fetch()
    assert (value.dtype, value) == (np.float64, third + 1e-12)
    assert (doubled.dtype, doubled) == (np.float64, 2e-12)
    assert (whole.fetch().dtype, whole.fetch()) == (np.int64, 2**40 + 1)
    assert (narrow.fetch().dtype, narrow.fetch()) == (np.float32, np.float32(third) * 2)
    with jax.enable_x64(True):
        assert v.numpy() == third + 1e-12


def test_a_scheduled_function_may_fail_for_nan_and_changes_nothing() -> None:
    strategy = make_strategy()
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = jaxdist.Variable(np.float32(0))

    def take_log(x: Any) -> Any:
        v.assign_add(1.0)
        return jnp.log(x)

    with jax.debug_nans(True):
        coordinator.schedule(take_log, (np.float32(-1),))
    with refused(NotFiniteError, "take_log returned or sent", "nan"):
        coordinator.join()
    assert v.numpy() == 0
    assert np.isnan(coordinator.schedule(take_log, (np.float32(-1),)).fetch())
    assert v.numpy() == 1


@pytest.mark.parametrize("name", ["jax_numpy_dtype_promotion", "jax_default_prng_impl"])
def test_workers_make_a_dataset_with_the_settings_of_who_asks(name: str) -> None:
    block, value = SETTINGS[name]
    seen: list[Any] = []

    def make() -> Any:
        seen.append(_read(name))
        return [np.ones(2, "float32")] * 3

    coordinator = ClusterCoordinator(make_strategy(workers=1))
    with block():
        dataset = iter(coordinator.create_per_worker_dataset(make))
    assert coordinator.schedule(lambda d: next(d).sum(), (dataset,)).fetch() == 2
    other = iter(coordinator.create_per_worker_dataset(make))
    assert coordinator.schedule(lambda d: next(d).sum(), (other,)).fetch() == 2
    assert seen[0] == value
    assert seen[-1] != value


def test_a_dataset_that_fails_by_a_setting_is_named() -> None:
    def make() -> Any:
        return [jnp.ones(2, "int32") + jnp.ones(2, "float32")]

    coordinator = ClusterCoordinator(make_strategy(workers=1))
    with jax.numpy_dtype_promotion("strict"):
        dataset = iter(coordinator.create_per_worker_dataset(make))
    with pytest.raises(ClosureInputError, match="promotion"):
        coordinator.schedule(lambda d: next(d).sum(), (dataset,)).fetch()


def test_a_function_of_a_server_has_the_settings_where_it_was_registered() -> None:
    wide = jax.ShapeDtypeStruct((), np.float64)
    server = rpc.Server.create("local", "localhost:0")
    with jax.enable_x64(True):
        server.register("double", lambda x: x * 2, [wide])
    server.register("make", lambda: jnp.asarray(0.5))
    server.start()
    try:
        client: Any = rpc.Client.create("local", server.address)
        found = client.double_blocking(np.float64(1) / 3)
        assert (found.dtype, found) == (np.float64, np.float64(2) / 3)
        assert client.make_blocking().dtype == np.float32
    finally:
        server.stop()
