"""Notices of Google Compute Engine, with recorded answers of its metadata server."""

import http.server
import pathlib
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import flax.nnx as nnx
import pytest

from jaxdist._preemption import config, notices
from jaxdist._preemption.config import (
    complete_config,
    find_metadata_server,
    has_maintenance_event,
    read_metadata,
)
from jaxdist.errors import ArgumentTypeError
from jaxdist.experimental import PreemptionCheckpointHandler, TerminationConfig

# What the server answers on `instance/maintenance-event`.
NONE, MIGRATE, END = "NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"


@pytest.mark.parametrize(("answer", "expected"), [(NONE, False), (MIGRATE, False), (END, True)])
def test_only_an_event_that_ends_the_machine_is_a_notice(answer: str, expected: bool) -> None:
    asked: list[str] = []

    def read(path: str) -> str:
        asked.append(path)
        return answer

    assert has_maintenance_event(read) is expected
    assert asked == ["instance/maintenance-event"]


def test_a_server_that_does_not_answer_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    def read(path: str) -> str:
        raise TimeoutError("planted")

    assert has_maintenance_event(read) is False
    assert "did not answer: planted" in caplog.text


def test_the_product_of_the_machine_decides(tmp_path: pathlib.Path) -> None:
    product = tmp_path / "product_name"
    assert find_metadata_server(str(product)) is None
    product.write_text("Google Compute Engine\n")
    assert find_metadata_server(str(product)) is read_metadata
    product.write_text("Standard PC\n")
    assert find_metadata_server(str(product)) is None


@pytest.fixture
def server() -> Iterator[str]:
    """A metadata server, which wants the header that Google's wants."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = self.headers["Metadata-Flavor"] == "Google"
            good &= self.path == "/computeMetadata/v1/instance/maintenance-event"
            self.send_response(200 if good else 403)
            self.end_headers()
            self.wfile.write(END.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Be quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_the_server_is_asked_with_its_header(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_IP", server)
    assert read_metadata("instance/maintenance-event") == END
    assert has_maintenance_event(read_metadata)


def test_a_proxy_of_the_environment_does_not_get_the_requests(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as nobody:
        # Bound and not listening: a connection is refused.
        nobody.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "REQUEST_METHOD"):
            monkeypatch.delenv(name, raising=False)
        # The first request of a process makes an opener, which keeps its proxies.
        monkeypatch.setattr("urllib.request._opener", None)
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://{server}/", timeout=5)
        monkeypatch.setenv("GCE_METADATA_IP", server)
        assert read_metadata("instance/maintenance-event") == END


@pytest.mark.parametrize(
    ("accelerators", "grace"), [({"GPU": 8}, 3600.0), ({}, 0.0), ({"TPU": 4}, 0.0)]
)
def test_there_a_job_ends_with_143_and_gpus_have_an_hour(
    accelerators: dict[str, int], grace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxdist._devices.chips.accelerators", lambda process: accelerators)
    complete = complete_config(None, lambda path: END)
    assert complete.watch is not None
    assert complete.watch()
    assert complete.grace == grace
    with pytest.raises(SystemExit) as caught:
        complete.exit()
    assert caught.value.code == 143


def test_what_the_user_gives_comes_before_the_defaults_of_the_machine() -> None:
    given = TerminationConfig(lambda: False, lambda: 7, 3)
    complete = complete_config(given, lambda path: END)
    assert complete.watch is given.termination_watcher_fn
    assert (complete.exit(), complete.grace) == (7, 3.0)


def test_elsewhere_it_is_sigterm_and_42() -> None:
    complete = complete_config(None, None)
    assert (complete.watch, complete.grace, complete.save) == (None, 0.0, None)
    with pytest.raises(SystemExit) as caught:
        complete.exit()
    assert caught.value.code == 42


def test_an_event_of_the_machine_ends_a_job(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices.Questions.__init__, "__defaults__", (0.01,))
    answers = iter([NONE, MIGRATE, END])
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    handler = PreemptionCheckpointHandler(
        None, model, tmp_path, read_metadata=lambda path: next(answers)
    )

    def train() -> None:
        while True:
            handler.run(time.sleep, 0.01)

    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 143
    runs = handler.total_run_calls
    handler.close()
    again = PreemptionCheckpointHandler(None, model, tmp_path)
    assert again.total_run_calls == runs > 1
    again.close()


def test_a_reader_that_is_no_function_is_refused(tmp_path: pathlib.Path) -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentTypeError, match="read_metadata=7"):
        PreemptionCheckpointHandler(None, model, tmp_path, read_metadata=7)  # type: ignore[arg-type]
    assert config.find_metadata_server("/does/not/exist") is None
