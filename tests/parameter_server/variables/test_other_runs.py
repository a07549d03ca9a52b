"""Variables that another run has left on the servers."""

import logging
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np
import pytest

from jaxdist._parameter_server.protocol import Change
from jaxdist._parameter_server.server import VariableServer
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist.errors import CheckpointError


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


def make_servers(folder: pathlib.Path) -> list[VariableServer]:
    """Two servers that write snapshots into a folder, and begin with what is there."""
    return [
        VariableServer(f"ps:{n}", snapshot_directory=folder, snapshot_seconds=1e6) for n in range(2)
    ]


def run(servers: Sequence[VariableServer], client: str, *names: str) -> Servers:
    """A run that makes variables, changes the first one, and traces a function."""
    found = Servers(servers, client)
    for name in names:
        found.create(name, np.zeros(2))
    found.save_new()
    found.change(Change("add", names[0], (np.ones(2),)))
    return found


def restart(servers: Sequence[VariableServer], folder: pathlib.Path) -> list[VariableServer]:
    """The servers that begin with the last snapshots."""
    for server in servers:
        server.close()
    return make_servers(folder)


def test_snapshots_with_none_of_the_variables_are_an_error(tmp_path: pathlib.Path) -> None:
    servers = make_servers(tmp_path)
    run(servers, "first", "a", "b", "c")
    for server in servers:
        server.close()
    other = shutil.copytree(tmp_path, tmp_path.with_name("other"))
    servers = make_servers(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        run(servers, "second", "x", "y")
    assert "variables 'x' on ps:0, 'y' on ps:1 were made on servers" in str(caught.value)
    assert "other variables: 'a' on ps:0, 'b' on ps:1, 'c' on ps:0" in str(caught.value)
    assert "another snapshot directory" in str(caught.value)
    # The same names in another order are on other servers.
    with pytest.raises(CheckpointError, match="in the same order"):
        run(make_servers(other), "third", "b", "a")


def test_some_variables_that_are_not_in_the_snapshots_are_said(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = make_servers(tmp_path)
    run(servers, "first", "a", "b", "c")
    servers = restart(servers, tmp_path)
    caplog.clear()
    second = run(servers, "second", "a", "x", "c")
    of_value, warning = list_warnings(caplog)
    assert of_value.startswith("Variable 'a' exists")
    assert "these do not have 'x' on ps:1: what" in warning
    assert "also have 'b' on ps:1, which" in warning
    # Each is said once; and one that is made later, when it is made.
    second.save_new()
    assert len(list_warnings(caplog)) == 2
    second.create("d", np.zeros(2))
    second.save_new()
    assert "these do not have 'd' on ps:1: what" in list_warnings(caplog)[2]


def test_a_run_that_goes_on_is_not_warned_of_its_variables(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = make_servers(tmp_path)
    run(servers, "first", "a", "b", "c")
    servers = restart(servers, tmp_path)
    second = run(servers, "second", "a")
    for name in ("b", "c"):
        second.create(name, np.zeros(2))
    second.save_new()
    assert [w for w in list_warnings(caplog) if "snapshots" in w and "begins with" in w] == []


def test_a_run_whose_server_comes_back_makes_more_variables(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = make_servers(tmp_path)
    first = run(servers, "first", "a", "b")
    first.links[:] = restart(servers, tmp_path)
    first.create("c", np.zeros(2))
    first.save_new()
    assert list_warnings(caplog) == []
