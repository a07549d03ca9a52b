"""What `RunOptions` takes."""

import logging
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist import RunOptions
from jaxdist.errors import ArgumentTypeError

ONE = np.float32(1)


def _add_one(x: Any) -> Any:
    return x + 1


@pytest.mark.parametrize("given", [0, (0,), [0], {0}], ids=repr)
def test_one_number_or_several_may_be_given(given: Any) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0"])
    x = jaxdist.MirroredStrategy(["cpu:0"]).run(_add_one, (ONE,))
    assert float(strategy.run(_add_one, (x,), options=RunOptions(donate_argnums=given))) == 3
    assert x.is_deleted()


@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": "0"},
        {"donate_argnums": (0.5,)},
        {"donate_argnums": (True,)},
        {"donate_argnums": None},
        {"static_argnames": 3},
        {"static_argnames": (0,)},
    ],
    ids=repr,
)
def test_an_entry_of_another_type_is_refused_by_name(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ArgumentTypeError) as error:
        jaxdist.MirroredStrategy().run(_add_one, (ONE,), options=RunOptions(**options))
    assert f"RunOptions was given {name}={value!r}" in str(error.value)


def test_documented_entries_without_effect_are_taken_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = jaxdist.MirroredStrategy()
    options = RunOptions(experimental_xla_options={"unhashable": []})
    with caplog.at_level(logging.INFO, logger="jaxdist"):
        for _ in range(3):
            assert float(strategy.run(_add_one, (ONE,), options=options)) == 2
    assert [r.message.count("no effect") for r in caplog.records] == [1]
