"""`jaxdist.Server`: which task it is, starting and stopping, and its errors."""

import contextlib
import pathlib
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist._parameter_server import ServerDef
from jaxdist._parameter_server.protocol import (
    Change,
    ChangeVariables,
    Create,
    Creation,
    Hello,
    Read,
)
from jaxdist._parameter_server.transport import Message, connect
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist.cli import main
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClusterError,
    ContextError,
    NotFoundError,
    UnauthenticatedError,
    UnsupportedError,
)
from tests.parameter_server.tasks.cluster import make_cluster

_TWO = {"ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0", "127.0.0.1:0"]}


@contextlib.contextmanager
def running(*arguments: Any, **options: Any) -> Iterator[jaxdist.Server]:
    """A server that is stopped at the end."""
    server = jaxdist.Server(*arguments, **options)
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize(
    "address",
    ["localhost:12:13", "localhost", "localhost:", ":2222", "localhost:99999", "local host:1", ""]
    + ["localhost:1 ", "::1:2222", "[::1]", "grpc://localhost:1", "localhost:-1", "a..b:1"],
)
@pytest.mark.parametrize("job", ["ps", "worker"])
def test_an_address_that_is_none_is_found_when_a_task_is_made(job: str, address: str) -> None:
    tasks = {"ps": ["a:1"], "worker": ["b:1"], job: ["c:1", address]}
    said = f"was given the address {address!r} of {job} 1"
    # The task itself, and another one, which would connect to it.
    for task in (("ps", 0), ("worker", 0), (job, 1)):
        with pytest.raises(ArgumentError, match=re.escape(said)) as caught:
            jaxdist.Server(tasks, *task, start=False)
        assert "host:port" in str(caught.value)
        assert "'[::1]:2222'" in str(caught.value)
    resolver = SimpleClusterResolver(ClusterSpec(tasks), task_type="chief", rpc_layer="grpc")
    with pytest.raises(ArgumentError, match=re.escape(f"ParameterServerStrategy {said}")):
        jaxdist.ParameterServerStrategy(resolver)
    if job == "ps":
        resolver = SimpleClusterResolver(ClusterSpec(tasks), task_type="worker", task_id=0)
        with pytest.raises(ArgumentError, match=re.escape(said)):
            jaxdist.compat.v1.experimental.ParameterServerStrategy(resolver)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("no_such_module_there", "has no such module"),
        ("jaxdist.no_such_module", "has no such module"),
        ("no_such_package.data", "cannot import it: No module named 'no_such_package'"),
        ("json.decoder.more", "cannot import it"),
        ("", "has no such module"),
        ("my_data.py", "has no such module|cannot import it"),
    ],
)
def test_a_module_that_is_not_there_is_found_at_the_start(module: str, said: str) -> None:
    server = jaxdist.Server(_TWO, "worker", 0, modules=["json", module], start=False)
    with pytest.raises(ArgumentError, match=said) as caught:
        server.start()
    assert f"the module {module!r}" in str(caught.value)
    assert "PYTHONPATH" in str(caught.value)
    # A parameter server calls no dataset functions.
    with running(_TWO, "ps", modules=[module]) as other:
        assert other.target


def test_modules_that_are_there_are_taken() -> None:
    with running(_TWO, "worker", 0, modules=[__name__, "json.decoder", "wave"]) as server:
        assert server.target


def test_addresses_of_ipv6_are_in_brackets() -> None:
    server = jaxdist.Server({"ps": ["[::1]:2222"], "worker": ["h.example:1"]}, "ps", start=False)
    assert server.server_def.address == "[::1]:2222"


@pytest.mark.parametrize(
    ("given", "arguments", "task"),
    [
        ({"ps": ["127.0.0.1:0"]}, {}, ("ps", 0)),
        (ClusterSpec({"worker": {3: "127.0.0.1:0"}}), {}, ("worker", 3)),
        (ClusterSpec(_TWO).as_cluster_def(), {"job_name": "ps"}, ("ps", 0)),
        (_TWO, {"job_name": "worker", "task_index": 1}, ("worker", 1)),
        (ServerDef(ClusterSpec(_TWO), "worker", 1), {}, ("worker", 1)),
        (ServerDef(ClusterSpec(_TWO), "worker", 1), {"task_index": 0}, ("worker", 0)),
        (_TWO, {"job_name": "ps", "protocol": "grpc"}, ("ps", 0)),
    ],
)
def test_a_server_is_one_task_of_a_cluster(
    given: Any, arguments: dict[str, Any], task: tuple[str, int]
) -> None:
    server = jaxdist.Server(given, **arguments, start=False)
    found = server.server_def
    assert (found.job_name, found.task_index, found.protocol) == (*task, "grpc")
    assert repr(server) == f"Server({task[0]}:{task[1]}, 127.0.0.1:0)"


@pytest.mark.parametrize(
    ("given", "arguments", "kind", "said"),
    [
        (3, {}, ArgumentTypeError, "was given server_or_cluster_def=3"),
        (
            SimpleClusterResolver(ClusterSpec(_TWO), task_type="ps", task_id=0),
            {},
            ArgumentTypeError,
            r"Server\(resolver.cluster_spec\(\), resolver.task_type, resolver.task_id\)",
        ),
        ({}, {}, ArgumentError, "without a job"),
        ({"ps": 3}, {}, ArgumentTypeError, r"server_or_cluster_def\['ps'\]=3"),
        (_TWO, {}, ArgumentError, "no job_name, and a cluster with the jobs"),
        (_TWO, {"job_name": "worker"}, ArgumentError, "no task_index, and a cluster with 2 tasks"),
        (_TWO, {"job_name": "chief"}, NotFoundError, "job_name='chief', and the cluster has no"),
        (_TWO, {"job_name": "ps", "task_index": 1}, NotFoundError, "task_index=1, and job 'ps'"),
        ({"ps": ["127.0.0.1:0"]}, {"protocol": "grpc+verbs"}, UnsupportedError, "grpc.verbs"),
        ({"ps": ["127.0.0.1:0"]}, {"config": object()}, UnsupportedError, "config="),
        ({"ps": ["127.0.0.1:0"]}, {"modules": "data"}, ArgumentTypeError, "modules='data'"),
        ({"ps": ["localhost:12:13x"]}, {}, ArgumentError, "a port from 0 to 65535"),
        ({"ps": ["localhost"]}, {}, ArgumentError, "the address 'localhost' of ps 0"),
    ],
)
def test_what_is_no_task_is_a_named_error(
    given: Any, arguments: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        jaxdist.Server(given, **arguments)


def test_a_port_that_is_in_use_is_a_named_error_and_frees_the_snapshots(
    tmp_path: pathlib.Path,
) -> None:
    first = jaxdist.Server.create_local_server()
    address = first.target.removeprefix("grpc://")
    with pytest.raises(ClusterError, match=f"was to listen on {address}, and cannot"):
        jaxdist.Server({"ps": [address]}, snapshot_directory=tmp_path)
    first.stop()
    second = jaxdist.Server({"ps": [address]}, snapshot_directory=tmp_path)
    assert second.target == f"grpc://{address}"
    second.start()
    second.stop()


def test_an_address_of_another_machine_is_a_named_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret of enough letters for a task\n")
    monkeypatch.setenv("JAXDIST_SECRET_FILE", str(secret))
    # An address for documentation (RFC 5737), which no machine has.
    with pytest.raises(ClusterError, match=r"was to listen on 192\.0\.2\.1:2222,") as caught:
        jaxdist.Server({"ps": ["192.0.2.1:2222"]})
    assert "The address is one of this machine" in str(caught.value)


def test_a_server_that_does_not_run_says_so() -> None:
    server = jaxdist.Server.create_local_server(start=False)
    for use in (lambda: server.target, server.join):
        with pytest.raises(ContextError, match="the server does not run"):
            use()
    with pytest.raises(ContextError, match="which was not started"):
        server.snapshot()
    server.start()
    channel = connect(server.target.removeprefix("grpc://"), layer="grpc")
    assert channel.call(Message("hello")).fields == {"task": "local:0"}
    channel.close()
    waiting = threading.Thread(target=server.join)
    waiting.start()
    server.stop()
    waiting.join(20)
    assert not waiting.is_alive()


def test_an_address_that_others_reach_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXDIST_SECRET", raising=False)
    with pytest.raises(UnauthenticatedError, match="without TLS and without a secret"):
        jaxdist.Server({"worker": ["0.0.0.0:0"]})


def test_a_snapshot_holds_what_was_changed_and_the_next_server_begins_with_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_SNAPSHOT_DIRECTORY", str(tmp_path))
    values, channels = [], []
    for n in range(3):
        server = jaxdist.Server({"ps": ["127.0.0.1:0"]})
        channels.append(connect(server.target.removeprefix("grpc://"), layer="grpc"))
        link = RemoteServer(channels[-1], 0)
        link.call(Create([Creation("v", np.zeros(2))]))
        values.append(float(link.call(Read(["v"])).values["v"][0]))
        changes = [Change("add", "v", (np.ones(2),))]
        link.call(ChangeVariables(changes, client="c", closure=n + 1))
        if n == 0:
            assert server.snapshot()["applied"] == 1
        found = link.call(Hello("c"))
        # Each restart tells what it has found.
        assert [r.counted for r in found.restores] == [[1], [1, 2]][:n]
        server.stop()
    for channel in channels:
        channel.close()
    assert values == [0, 1, 2]


@pytest.mark.slow
def test_a_server_that_is_told_to_end_writes_a_last_snapshot(tmp_path: pathlib.Path) -> None:
    env = {"JAXDIST_SNAPSHOT_DIRECTORY": str(tmp_path)}
    with make_cluster("50", env=env, workers=1) as cluster:
        cluster.start_all().wait_for("end")
        server = cluster.tasks["ps 0"].process
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == -signal.SIGTERM
    restarted = jaxdist.Server({"ps": ["127.0.0.1:0"]}, snapshot_directory=tmp_path)
    assert restarted._variables is not None
    assert int(restarted._variables.call(Read(["count"])).values["count"]) == 50
    restarted.stop()


@pytest.mark.parametrize(
    ("config", "arguments", "said"),
    [
        ("{}", (), "found no cluster in the environment variable TF_CONFIG"),
        ('{"cluster": {"ps": ["127.0.0.1:0"]}}', (), "as a task of the job"),
        (
            '{"cluster": {"ps": ["127.0.0.1:0"]}, "task": {"type": "ps", "index": 0}}',
            ("--index", "4"),
            "task_index=4",
        ),
    ],
)
def test_jaxdist_server_says_what_it_was_not_told(
    config: str,
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    assert main(["server", *arguments]) == 2
    assert said in capsys.readouterr().err
