"""Variables that another run has left on the servers."""

import logging

import numpy as np
import pytest

from jaxdist._parameter_server.server import Change, VariableServer
from jaxdist._parameter_server.variables.servers import Servers


def list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of jaxdist."""
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_value_of_another_run_that_counts_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    server = VariableServer()
    first = Servers([server], "first")
    first.create("v", np.zeros(2))
    first.create("w", np.zeros(2))
    first.change(Change("add", "v", (np.ones(2),)))
    assert list_warnings(caplog) == []
    second = Servers([server], "second")
    second.create("v", np.full(2, 5.0))
    second.create("w", np.full(2, 5.0))
    assert second.read("v").tolist() == [1, 1]
    (warning,) = list_warnings(caplog)
    assert warning.startswith("Variable 'v' exists on ps:0, where another run has made it and cha")
    assert "changed it 1 time(s)" in warning


def test_who_asks_again_after_a_lost_reply_has_made_the_variable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = VariableServer()
    Servers([server], "one").create("v", np.zeros(2))
    Servers([server], "one").create("v", np.zeros(2))
    assert list_warnings(caplog) == []
