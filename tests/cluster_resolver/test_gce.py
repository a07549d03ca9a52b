"""The resolver of Compute Engine, with recorded answers of its API and metadata server."""

import http.server
import sys
import threading
import types
from typing import Any

import pytest

from jaxdist.cluster_resolver import GCEClusterResolver
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClusterError,
    ContextError,
    MissingExtraError,
)
from tests.strategies.oracle import refused

_URL = "https://www.googleapis.com/compute/v1/projects/p/zones/z/instances/"
_PAGES: list[dict[str, Any]] = [
    {
        "kind": "compute#instanceGroupsListInstances",
        "items": [
            {"instance": f"{_URL}vm-a", "status": "RUNNING"},
            {"instance": f"{_URL}vm-b", "status": "RUNNING"},
        ],
        "nextPageToken": "2",
    },
    {
        "kind": "compute#instanceGroupsListInstances",
        "items": [{"instance": f"{_URL}vm-c", "status": "RUNNING"}],
    },
]
_ADDRESSES = {"vm-a": "10.128.0.9", "vm-b": "10.128.0.3", "vm-c": "10.128.0.5"}
_WHERE = {"project": "p", "zone": "z"}


class _Request:
    def __init__(self, answer: Any, page: int = 0) -> None:
        self._answer, self.page = answer, page

    def execute(self) -> Any:
        return self._answer


class _Service:
    """Answers as `googleapiclient.discovery.build('compute', 'v1')` does."""

    def __init__(self, pages: list[dict[str, Any]] | None = None) -> None:
        self.pages = _PAGES if pages is None else pages

    def instanceGroups(self) -> "_Service":
        return self

    def instances(self) -> "_Service":
        return self

    def listInstances(self, **asked: Any) -> _Request:
        body = {"instanceState": "RUNNING"}
        assert asked == {**_WHERE, "instanceGroup": "g", "body": body, "orderBy": "name"}
        return _Request(self.pages[0])

    def listInstances_next(self, previous_request: _Request, previous_response: Any) -> Any:
        page = previous_request.page + 1
        return _Request(self.pages[page], page) if "nextPageToken" in previous_response else None

    def get(self, instance: str, **where: Any) -> _Request:
        assert where == _WHERE
        return _Request({"name": instance, "networkInterfaces": [
            {"network": "default", "networkIP": _ADDRESSES[instance]}
        ]})  # fmt: skip


def _resolver(**made: Any) -> GCEClusterResolver:
    told: dict[str, Any] = {"service": _Service(), **made}
    return GCEClusterResolver("p", "z", "g", 8470, **told)


def test_machines_of_all_pages_are_sorted_by_address() -> None:
    resolver = _resolver()
    listed = ["10.128.0.3:8470", "10.128.0.5:8470", "10.128.0.9:8470"]
    assert resolver.cluster_spec() == {"worker": listed}
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.master() == "grpc://10.128.0.3:8470"
    assert resolver.master("worker", 2, "http") == "http://10.128.0.9:8470"
    resolver.task_id, resolver.rpc_layer = 1, None
    assert resolver.master() == "10.128.0.5:8470"


def test_a_group_without_machines_is_an_empty_job() -> None:
    assert _resolver(service=_Service([{}])).cluster_spec().as_dict() == {"worker": {}}


def test_the_job_is_not_set_later() -> None:
    with refused(ContextError, "task_type was set to 'ps'", "'worker'"):
        _resolver().task_type = "ps"


def test_this_machine_is_found_by_its_own_address() -> None:
    assert _resolver(task_id=None, metadata=lambda path: "10.128.0.5\n").task_id == 1
    with refused(ClusterError, "1.2.3.4", "3 machines of 'g'"):
        _ = _resolver(task_id=None, metadata=lambda path: "1.2.3.4").task_id
    with refused(ClusterError, "0 machines of 'g'"):
        lone = _resolver(task_id=None, metadata=lambda path: "1.2.3.4", service=_Service([{}]))
        _ = lone.task_id


class _Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_right = self.headers["Metadata-Flavor"] == "Google" and self.path.endswith("/0/ip")
        self.send_response(200 if is_right else 403)
        self.end_headers()
        self.wfile.write(b"10.128.0.9")

    def log_message(self, format: str, *_: Any) -> None:
        pass


def test_the_metadata_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Metadata)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        address = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("GCE_METADATA_IP", address)
        assert _resolver(task_id=None).task_id == 2
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    url = f"http://{address}/computeMetadata/v1/"
    with refused(ClusterError, "task_id=None", url, "Pass task_id"):
        _ = _resolver(task_id=None).task_id


def test_a_missing_package_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    with refused(MissingExtraError, "pip install google-api-python-client"):
        _resolver(service=None)


@pytest.mark.parametrize(("credentials", "passed"), [("default", None), ("mine", "mine")])
def test_credentials_reach_the_client(
    monkeypatch: pytest.MonkeyPatch, credentials: str, passed: str | None
) -> None:
    asked: list[Any] = []
    package = types.ModuleType("googleapiclient")
    discovery = types.ModuleType("googleapiclient.discovery")

    def build(*names: str, credentials: Any) -> _Service:
        asked.append((names, credentials))
        return _Service()

    vars(discovery)["build"] = build
    monkeypatch.setitem(sys.modules, "googleapiclient", package)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", discovery)
    assert _resolver(service=None, credentials=credentials).cluster_spec()
    assert asked == [(("compute", "v1"), passed)]


def test_wrong_arguments_are_refused() -> None:
    with refused(ArgumentError, "service", "googleapiclient"):
        _resolver(service=3)
    with refused(ArgumentTypeError, "metadata"):
        _resolver(metadata="x")
    with refused(ArgumentTypeError, "port"):
        GCEClusterResolver("p", "z", "g", "8470")  # type: ignore[arg-type]
