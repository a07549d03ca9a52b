"""Who may call a server, and where a server may listen."""

import logging
import pathlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxdist._parameter_server.transport import (
    Listener,
    Message,
    Security,
    connect,
    read_security,
    serve,
)
from jaxdist._parameter_server.transport import grpc_channel as channel_module
from jaxdist.errors import (
    ArgumentError,
    ClusterError,
    MissingExtraError,
    ProgramMismatchError,
    UnauthenticatedError,
    UnavailableError,
)

SECRET = "correct horse battery staple"
OTHER = "correct horse battery stable"


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET", "SECRET_FILE", "TLS_CERTIFICATE", "TLS_KEY", "TLS_AUTHORITY"):
        monkeypatch.delenv(f"JAXDIST_{name}", raising=False)


def echo(request: Message) -> Message:
    """Return the request."""
    return request


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    """Listeners that are stopped after the test."""
    found: list[Listener] = []
    yield found
    for listener in found:
        listener.stop()


def _serve(listeners: list[Listener], security: Security | None, host: str = "127.0.0.1") -> str:
    listeners.append(serve(f"{host}:0", {"echo": echo}, layer="grpc", security=security))
    return listeners[-1].address


def _call(address: str, security: Security | None) -> Message:
    channel = connect(address, layer="grpc", name="ps 0", security=security)
    try:
        return channel.call(Message("echo", {"x": 1}), 20)
    finally:
        channel.close()


def test_the_right_secret_is_let_through(listeners: list[Listener]) -> None:
    address = _serve(listeners, Security(SECRET))
    assert _call(address, Security(SECRET)).fields == {"x": 1}


@pytest.mark.parametrize("secret", [None, OTHER, SECRET + "x", "ä" * 20])
def test_another_secret_is_refused(listeners: list[Listener], secret: str | None) -> None:
    address = _serve(listeners, Security(SECRET))
    with pytest.raises(UnauthenticatedError, match=r"ps 0 at (.|\n)*JAXDIST_SECRET_FILE") as caught:
        _call(address, Security(secret))
    assert SECRET not in str(caught.value)


def test_a_secret_that_nobody_asked_for_does_no_harm(listeners: list[Listener]) -> None:
    assert _call(_serve(listeners, Security()), Security("ä" * 20)).method == "echo"


def test_health_can_be_asked_without_the_secret(listeners: list[Listener]) -> None:
    channel = connect(_serve(listeners, Security(SECRET)), layer="grpc", security=Security())
    channel.wait_until_ready(20)
    channel.close()


def test_watching_health_needs_the_secret(listeners: list[Listener]) -> None:
    grpc, health = channel_module.load_grpc(), channel_module.load_grpc("grpc_health.v1.health_pb2")
    address = _serve(listeners, Security(SECRET))
    with grpc.insecure_channel(address) as raw:
        watch = raw.unary_stream(
            "/grpc.health.v1.Health/Watch",
            health.HealthCheckRequest.SerializeToString,
            health.HealthCheckResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(health.HealthCheckRequest(), timeout=20))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        known = ((channel_module.SECRET_KEY, SECRET.encode()),)
        call = watch(health.HealthCheckRequest(), timeout=20, metadata=known)
        assert next(call).status == health.HealthCheckResponse.SERVING
        call.cancel()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "some.host.example"])
def test_a_server_that_others_reach_needs_tls_or_a_secret(
    listeners: list[Listener], host: str
) -> None:
    with pytest.raises(UnauthenticatedError, match="without TLS and without a secret"):
        _serve(listeners, Security(), host)
    with pytest.raises(UnauthenticatedError, match="JAXDIST_SECRET_FILE"):
        _serve(listeners, None, host)


def test_a_secret_without_tls_is_warned_of(
    listeners: list[Listener], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jaxdist"):
        address = _serve(listeners, Security(SECRET), "0.0.0.0")
    assert "can read the variables and the secret" in caplog.text
    assert SECRET not in caplog.text
    port = address.rpartition(":")[2]
    assert _call(f"127.0.0.1:{port}", Security(SECRET)).method == "echo"


def test_a_server_of_loopback_is_not_warned_of(
    listeners: list[Listener], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jaxdist"):
        for host in ("127.0.0.1", "localhost"):
            _serve(listeners, Security(SECRET), host)
    assert not caplog.text


def test_a_task_with_other_messages_is_named(
    listeners: list[Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = _serve(listeners, Security())
    monkeypatch.setattr(channel_module, "WIRE", "1")
    with pytest.raises(ProgramMismatchError, match="version 4 of messages, and the caller has 1"):
        _call(address, Security())


def test_a_server_that_is_no_task_of_jaxdist_is_named() -> None:
    grpc = channel_module.load_grpc()
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(UnavailableError, match="not a task of jaxdist"):
            _call(f"127.0.0.1:{port}", Security())
    finally:
        server.stop(None).wait(10)


def test_the_secret_is_not_shown() -> None:
    shown = repr(Security(SECRET, b"certificate", b"private"))
    assert SECRET not in shown
    assert "private" not in shown


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a secret of 5 characters"):
        Security("short")


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ArgumentError, match="a certificate and no key"):
        Security(certificate=b"x")
    with pytest.raises(ArgumentError, match="a key and no certificate"):
        Security(key=b"x")


def test_the_environment_has_the_secret(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    assert read_security({"JAXDIST_SECRET": SECRET}).secret == SECRET
    both = {"JAXDIST_SECRET_FILE": str(file), "JAXDIST_SECRET": OTHER}
    assert read_security(both).secret == SECRET
    assert read_security({"JAXDIST_SECRET": ""}) == Security()


def test_files_of_the_environment_that_cannot_be_read_are_named(tmp_path: pathlib.Path) -> None:
    gone = str(tmp_path / "gone")
    for name in ("SECRET_FILE", "TLS_CERTIFICATE", "TLS_KEY", "TLS_AUTHORITY"):
        with pytest.raises(ArgumentError, match=rf"JAXDIST_{name} is '.*gone'"):
            read_security({f"JAXDIST_{name}": gone})
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe" * 20)
    with pytest.raises(ArgumentError, match="not text"):
        read_security({"JAXDIST_SECRET_FILE": str(binary)})
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ArgumentError, match="a secret of 0 characters"):
        read_security({"JAXDIST_SECRET_FILE": str(tmp_path / "empty")})


def test_secrets_of_the_environment_are_used_on_both_sides(
    listeners: list[Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_SECRET", SECRET)
    address = _serve(listeners, None)
    assert _call(address, None).method == "echo"
    monkeypatch.setenv("JAXDIST_SECRET", OTHER)
    with pytest.raises(UnauthenticatedError):
        _call(address, None)


def test_without_grpc_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(channel_module.importlib, "import_module", fail)
    for call in (
        lambda: serve("127.0.0.1:0", {}, layer="grpc"),
        lambda: connect("127.0.0.1:1", layer="grpc"),
    ):
        with pytest.raises(MissingExtraError, match="pip install grpcio grpcio-health-checking"):
            call()


class Files:
    """Certificates of an authority of the test."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._openssl("req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2"
                      " -subj /CN=authority")  # fmt: skip
        self.authority = (folder / "ca.pem").read_bytes()
        self.certificate, self.key = self._make("task")

    def _make(self, name: str) -> tuple[bytes, bytes]:
        self._openssl(f"req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr"
                      f" -subj /CN={name}")  # fmt: skip
        (self._folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
        self._openssl(f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial"
                      f" -out {name}.pem -days 2 -extfile names")  # fmt: skip
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        return certificate.read_bytes(), key.read_bytes()

    def _openssl(self, command: str) -> None:
        subprocess.run(
            ["openssl", *command.split()], cwd=self._folder, check=True, capture_output=True
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Certificates of one authority."""
    return Files(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Certificates of another authority."""
    return Files(tmp_path_factory.mktemp("stranger"))


def test_tls_lets_callers_through_who_know_the_authority(
    listeners: list[Listener], files: Files, stranger: Files
) -> None:
    address = _serve(listeners, Security(certificate=files.certificate, key=files.key))
    assert _call(address, Security(authority=files.authority)).method == "echo"
    for security in (Security(), Security(authority=stranger.authority)):
        with pytest.raises(UnavailableError, match="ps 0 at"):
            _call(address, security)


def test_mutual_tls_refuses_callers_without_a_signed_certificate(
    listeners: list[Listener], files: Files, stranger: Files
) -> None:
    mutual = Security(
        certificate=files.certificate, key=files.key, authority=files.authority
    )  # fmt: skip
    address = _serve(listeners, mutual)
    assert _call(address, mutual).method == "echo"
    foreign = Security(
        certificate=stranger.certificate, key=stranger.key, authority=files.authority
    )
    for security in (Security(authority=files.authority), foreign, Security()):
        with pytest.raises(UnavailableError, match="ps 0 at"):
            _call(address, security)


def test_tls_and_a_secret_go_together(listeners: list[Listener], files: Files) -> None:
    own = Security(SECRET, files.certificate, files.key)
    address = _serve(listeners, own)
    known = Security(SECRET, authority=files.authority)
    assert _call(address, known).method == "echo"
    with pytest.raises(UnauthenticatedError):
        _call(address, Security(OTHER, authority=files.authority))


def test_tls_without_a_secret_is_warned_of(
    listeners: list[Listener], files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jaxdist"):
        _serve(listeners, Security(certificate=files.certificate, key=files.key), "0.0.0.0")
        assert "anybody may call it" in caplog.text
        caplog.clear()
        _serve(
            listeners,
            Security(certificate=files.certificate, key=files.key, authority=files.authority),
            "0.0.0.0",
        )
    assert not caplog.text


def test_files_that_are_no_certificates_are_named(listeners: list[Listener]) -> None:
    with pytest.raises(ClusterError, match="Files of TLS are PEM"):
        _serve(listeners, Security(certificate=b"x", key=b"y"))
