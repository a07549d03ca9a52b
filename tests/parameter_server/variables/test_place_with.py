"""Variables that are created on the server of another one."""

import pytest

import jaxdist
from jaxdist.errors import ArgumentError
from tests.parameter_server.strategy.making import make_strategy
from tests.parameter_server.strategy.version_1 import make_worker


@pytest.mark.parametrize("make", [make_strategy, make_worker], ids=["version 2", "version 1"])
def test_variables_are_colocated_on_one_server_and_the_next_one_is_where_it_would_be(
    make: object,
) -> None:
    assert callable(make)
    strategy = make()
    with strategy.scope():
        first, second = jaxdist.Variable(1.0), jaxdist.Variable([2.0])
        with strategy.extended.colocate_vars_with(second):
            beside = [jaxdist.Variable(0.0) for _ in range(3)]
            with strategy.extended.colocate_vars_with(first):
                inner = jaxdist.Variable(0.0)
        third = jaxdist.Variable(3.0)
    servers = [f"/job:ps/replica:0/task:{n}/device:CPU:0" for n in range(2)]
    assert [v.device for v in (first, second, third)] == [servers[0], servers[1], servers[0]]
    assert [v.device for v in beside] == [servers[1]] * 3
    assert inner.device == servers[0]
    beside[0].assign_add(4.0)
    assert float(beside[0]) == 4


def test_a_variable_of_another_strategy_is_refused() -> None:
    strategy, other = make_worker(), make_worker()
    with other.scope():
        v = jaxdist.Variable(1.0)
    with (
        strategy.scope(),
        pytest.raises(ArgumentError, match="colocate_with_variable"),
        strategy.extended.colocate_vars_with(v),
    ):
        pass
