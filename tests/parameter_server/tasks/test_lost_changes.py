"""What a task changes outside of functions, and a restarted server lacks, is counted and logged."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import pytest

from jaxdist._parameter_server.protocol import (
    Change,
    ChangeVariables,
    Create,
    Creation,
    GetStatistics,
    Hello,
    Read,
    ReadRows,
    WriteSnapshot,
)
from jaxdist._parameter_server.server import VariableServer, make_handlers
from jaxdist._parameter_server.strategy.losses import LossReport
from jaxdist._parameter_server.strategy.patient_server import PatientServer
from jaxdist._parameter_server.transport import connect, serve
from jaxdist._parameter_server.variables.servers import Servers
from jaxdist.errors import NotFoundError, UnavailableError
from tests.parameter_server.tasks.cluster import make_cluster
from tests.parameter_server.transport.task import poll
from tests.ports import find_free_ports

SCRIPT = pathlib.Path(__file__).with_name("lost_changes_script.py")


class _Case:
    """A server that can be killed and started, and the caller."""

    def __init__(self, folder: pathlib.Path, layer: str) -> None:
        self._folder, self._layer = folder, layer
        self._address = f"127.0.0.1:{find_free_ports(1)[0]}"
        self.start()
        self.caller = PatientServer(connect(self._address, layer=layer, name="ps 0"), 0)
        self.caller.call(Create([Creation(n, np.zeros(2, np.float32)) for n in ("v", "w")]))

    def start(self) -> None:
        """Start the server, from its snapshot if there is one."""
        options: dict[str, Any] = {"snapshot_directory": self._folder, "snapshot_seconds": 1e6}
        self.server = VariableServer("ps:0", **options)
        handlers = make_handlers(self.server)
        self.listener = serve(self._address, handlers, layer=self._layer)

    def restart(self) -> None:
        """Let the server lose what is in no snapshot."""
        self.listener.stop()
        self.start()

    def add(self, name: str, times: int = 1) -> None:
        for _ in range(times):
            self.caller.call(ChangeVariables([Change("add", name, (np.ones(2, np.float32),))]))

    def read(self, name: str) -> float:
        return float(self.caller.call(Read([name])).values[name][0])


@pytest.fixture(params=["local", "grpc"])
def case(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[_Case]:
    made = _Case(tmp_path, request.param)
    yield made
    made.caller.close()
    made.listener.stop()


def _list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "Lost changes" in r.getMessage()]


_USES: dict[str, Callable[[_Case], Any]] = {
    "read": lambda case: case.read("v"),
    "read_rows": lambda case: case.caller.call(ReadRows("v", np.array([0]))),
    "change": lambda case: case.add("w"),
    "hello": lambda case: case.caller.call(Hello("c")),
    "statistics": lambda case: case.caller.call(GetStatistics()),
}


@pytest.mark.parametrize("use", _USES)
def test_the_first_reply_of_a_restarted_server_shows_what_it_has_lost(
    case: _Case, caplog: pytest.LogCaptureFixture, use: str
) -> None:
    case.add("v")
    case.caller.call(WriteSnapshot())
    case.add("v", 2)
    case.restart()
    _USES[use](case)
    (said,) = _list_warnings(caplog)
    assert said.startswith("ps 0 was started again from its snapshot.")
    assert "functions: 2, and 2 since the job began. They changed 'v'." in said
    assert case.caller.count_lost_changes() == 2
    # Nothing is said twice.
    case.add("v")
    assert case.read("v") == 2
    assert len(_list_warnings(caplog)) == 1
    assert case.caller.count_lost_changes() == 2


def test_each_restart_is_counted_and_names_its_own_variables(
    case: _Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.caller.call(WriteSnapshot())
    case.add("v")
    case.restart()
    case.add("w", 3)
    case.restart()
    assert (case.read("v"), case.read("w")) == (0, 0)
    first, second = _list_warnings(caplog)
    assert "functions: 1, and 1 since the job began. They changed 'v'." in first
    assert "functions: 3, and 4 since the job began. They changed 'w'." in second
    case.add("v")
    case.caller.call(WriteSnapshot())
    case.restart()
    assert case.read("v") == 1
    assert case.caller.count_lost_changes() == 4
    assert len(_list_warnings(caplog)) == 2


def test_nothing_is_said_of_a_restart_that_has_lost_nothing(
    case: _Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.add("v", 2)
    case.caller.call(WriteSnapshot())
    case.restart()
    # A function of a worker, which has a number of its own.
    change = Change("add", "v", (np.ones(2, np.float32),))
    case.caller.call(ChangeVariables([change], client="c", closure=1))
    case.restart()
    assert case.read("v") == 2
    assert (_list_warnings(caplog), case.caller.count_lost_changes()) == ([], 0)


def test_many_variables_are_not_all_named(case: _Case, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"u{n}" for n in range(10)]
    case.caller.call(Create([Creation(n, np.zeros(2, np.float32)) for n in names]))
    case.caller.call(WriteSnapshot())
    for name in names:
        case.add(name)
    case.restart()
    case.read("v")
    (said,) = _list_warnings(caplog)
    assert "They changed 'u0', 'u1', 'u2', 'u3', 'u4', 'u5', 'u6', 'u7', 2 more." in said


def test_all_changes_are_lost_with_a_server_that_has_no_snapshot(
    case: _Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.add("v", 2)
    case.restart()
    with pytest.raises(NotFoundError, match="was started again, and has no variables"):
        case.read("v")
    (said,) = _list_warnings(caplog)
    assert "ps 0 was started again without a snapshot." in said
    assert case.caller.count_lost_changes() == 2


def test_a_server_that_is_gone_again_is_asked_at_the_next_call(
    case: _Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.caller.call(WriteSnapshot())
    case.add("v")
    case.restart()

    def fail(client: str) -> NoReturn:
        raise UnavailableError("This server does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(case.caller, "_ask", fail)
        assert case.read("v") == 0
        assert _list_warnings(caplog) == []
    case.add("w")
    (said,) = _list_warnings(caplog)
    assert "They changed 'v'." in said


@pytest.mark.parametrize("is_read", [False, True])
def test_a_function_that_uses_a_restarted_server_lets_this_task_ask(
    case: _Case, caplog: pytest.LogCaptureFixture, is_read: bool
) -> None:
    report = LossReport(Servers([case.caller], "c"), "c", "functions")
    case.caller.call(WriteSnapshot())
    case.add("v")
    used = {0: case.caller.incarnation}
    report.note(1, {}, used)
    case.restart()
    used = {0: case.server.incarnation}
    report.note(2, {} if is_read else used, used if is_read else {})
    poll(lambda: len(_list_warnings(caplog)) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("user", ["chief", "function", "nobody"])
def test_what_the_chief_has_assigned_and_a_killed_server_has_lost_is_reported(
    tmp_path: pathlib.Path, user: str
) -> None:
    env = {"JAXDIST_SNAPSHOT_DIRECTORY": str(tmp_path)}
    with make_cluster(user, script=SCRIPT, ps=2, workers=1, env=env) as cluster:
        chief = cluster.start_all()
        changed = chief.wait_for("changed")
        assert (changed["rate"], changed["lost"]) == (5, 0)
        assert "task:0" in changed["server"]
        cluster.tasks["ps 0"].kill()
        cluster.start("ps 0")
        chief.tell()
        end = chief.wait_for("end")
    assert end["used"] == (None if user == "nobody" else 1)
    (said,) = [text for text in end["warnings"] if "Lost changes" in text]
    # Two of `rate`, and the step that the chief ran itself.
    names = "'rate', 'shift'"
    assert "ps 0 was started again from its snapshot." in said
    assert f"functions: 3, and 3 since the job began. They changed {names}." in said
    assert end["lost_changes"] == end["again"] == 3
    assert end["applied"] + end["lost"] == end["scheduled"], end
    assert end["lost"] == 0
