"""Functions that read and change variables of the server's process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.experimental import rpc
from tests.parameter_server.rpc.serving import FLOAT, INT, LAYERS, serve_methods


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_no_change_of_several_clients_at_a_time_is_lost(layer: str, is_compiled: bool) -> None:
    total = jaxdist.Variable(0, name="total")

    def add(number: Any) -> None:
        total.assign_add(number)

    function = jaxdist.function(add) if is_compiled else add
    methods = {"add": (function, [INT]), "read": (lambda: total.value(), None)}
    with serve_methods(methods, layer) as (server, client):
        clients = [rpc.Client.create(layer, server.address, name=f"{n}") for n in range(3)]

        def work(own: Any) -> None:
            results = [own.add(number) for number in range(20)]
            assert all(result.is_ok() for result in results)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, clients))
        assert client.read_blocking() == 3 * sum(range(20))
        assert int(total) == 3 * sum(range(20))
        for own in clients:
            own.close()


def test_hundreds_of_calls_of_several_clients_that_wait_are_all_answered() -> None:
    go_on = threading.Event()
    with serve_methods({"wait": (lambda: go_on.wait(20), None)}) as (server, _):
        clients: list[Any] = [rpc.Client.create("grpc", server.address) for _ in range(4)]
        results = [client.wait() for _ in range(100) for client in clients]
        go_on.set()
        assert all(result.get_value() for result in results)
        for client in clients:
            client.close()


def test_a_function_may_run_steps_of_a_strategy() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        weight = jaxdist.Variable(1.0, name="weight", aggregation=jaxdist.VariableAggregation.MEAN)

    @jaxdist.function
    def train(x: Any) -> Any:
        def step() -> Any:
            weight.assign_add(x)
            return weight.value() * 2

        return strategy.reduce("SUM", strategy.run(step), axis=None)

    with serve_methods({"train": (train, [FLOAT])}) as (_, client):
        assert client.train_blocking(2.0) == 12
        assert client.train_blocking(1.0) == 16
    assert float(weight.value()) == 4
    assert train.experimental_get_tracing_count() == 1


def test_a_concurrent_function_may_wait_for_another_call() -> None:
    arrived = threading.Barrier(2)

    def meet() -> int:
        return int(arrived.wait(20) >= 0)

    with serve_methods({"meet": (meet, None)}, concurrent=True) as (_, client):
        both = [client.meet(), client.meet()]
        assert [result.get_value() for result in both] == [1, 1]


def test_other_functions_run_one_after_the_other() -> None:
    running: list[int] = []
    most: list[int] = []

    def work() -> None:
        running.append(1)
        most.append(len(running))
        jnp.ones(1000).sum().block_until_ready()
        running.pop()

    with serve_methods({"one": (work, None), "two": (work, None)}) as (_, client):
        results = [method() for _ in range(20) for method in (client.one, client.two)]
        assert all(result.is_ok() for result in results)
    assert max(most) == 1


def test_arguments_are_arrays_of_jax_as_in_a_compiled_function() -> None:
    spec = jax.ShapeDtypeStruct((2,), jnp.int32)

    def divide(x: Any) -> Any:
        assert isinstance(x, jax.Array)
        return x / 2

    methods = {"plain": (divide, [spec]), "compiled": (jaxdist.function(divide), [spec])}
    with serve_methods(methods) as (_, client):
        for method in (client.plain_blocking, client.compiled_blocking):
            found = method(np.array([1, 3], np.int32))
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, [0.5, 1.5])
