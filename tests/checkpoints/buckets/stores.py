"""Stores of buckets on this machine: moto for S3, and an emulator of Google Cloud Storage.

Both are behind a proxy, which fails as real stores do, and which does what the emulator of
Google Cloud Storage does not know: preconditions, generations, and a part of a listing.
"""

import contextlib
import functools
import http.client
import http.server
import json
import logging
import re
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any

import pytest
import tensorstore

from jaxdist._buckets import path as path_module
from jaxdist._checkpoints import bucket_lock

SCHEMES = ("gs", "s3")
BUCKET = "bucket"

# From the number of a request, its method and its key: the status of an error, or None.
Fault = Callable[[int, str, str], int | None]


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a store, except those that are to fail.

    Attributes:
        fail: Decides which requests fail: with a status, or with 0 by a cut connection.
        cuts: Decides, when the store has done a request, whether its answer is lost.
        lag: How many listings a listing is late.
        requests: Method and key of each request since `reset`.
        users: The keys of AWS that have signed them.
    """

    daemon_threads = True

    def __init__(self, scheme: str, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheme, self.port = scheme, port
        self.lock = threading.RLock()
        self.generations: dict[str, int] = {}
        self.listings: dict[str, list[Any]] = {}
        self.last_generation = 1
        self.reset()

    def reset(self) -> None:
        """Fail no more, and forget the requests."""
        self.fail: Fault = lambda number, method, key: None
        self.cuts: Callable[[int, str, str], bool] = lambda number, method, key: False
        self.lag = 0
        self.requests: list[tuple[str, str]] = []
        self.users: set[str] = set()

    @property
    def url(self) -> str:
        """The address of the proxy."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for headers and content, or each answer takes 40 ms
    disable_nagle_algorithm = True

    @property
    def proxy(self) -> Proxy:
        assert isinstance(self.server, Proxy)
        return self.server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        answer: Any = None
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        key, is_listing = _find_key(self.command, self.path)
        proxy = self.proxy
        # One request at a time, since the preconditions belong to it.
        with proxy.lock:
            proxy.requests.append((self.command, key))
            signed = re.search(r"Credential=([^/]*)/", self.headers.get("authorization", ""))
            proxy.users.add(signed[1] if signed else "")
            status = proxy.fail(len(proxy.requests), self.command, key)
            if status == 0:
                self.close_connection = True
                self.connection.close()
                return
            if status is not None:
                answer = (status, [], _make_error(proxy.scheme, status))
            elif proxy.scheme == "gs" and f"/b/{BUCKET}/" not in self.path:
                answer = (404, [], _make_error("gs", 404))
            elif proxy.scheme == "gs" and not self._meets_conditions(key):
                answer = (412, [], _make_error("gs", 412))
            else:
                answer = self._pass_on(body)
                if proxy.scheme == "gs":
                    change = self._cut_listing if is_listing else self._add_generation
                    answer = change(key, answer)
                if proxy.cuts(len(proxy.requests), self.command, key):
                    self.close_connection = True
                    self.connection.close()
                    return
            if is_listing:
                seen = proxy.listings.setdefault(self.path, [])
                seen.append(answer)
                answer = seen[max(0, len(seen) - 1 - proxy.lag)]
        status, headers, content = answer
        self._answer(status, headers, content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def _pass_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        store = http.client.HTTPConnection("127.0.0.1", self.proxy.port)
        with contextlib.closing(store):
            store.request(self.command, self.path, body, dict(self.headers))
            answer = store.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _meets_conditions(self, key: str) -> bool:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        wanted = query.get("ifGenerationMatch")
        return wanted is None or int(wanted[0]) == self.proxy.generations.get(key, 0)

    def _add_generation(self, key: str, answer: Any) -> Any:
        proxy, (status, headers, content) = self.proxy, answer
        if self.command == "POST" and status == 200:
            proxy.last_generation += 1
            proxy.generations[key] = proxy.last_generation
            about = json.loads(content)
            content = json.dumps({**about, "generation": str(proxy.last_generation)}).encode()
        if self.command == "DELETE" and status < 300:
            proxy.generations.pop(key, None)
        if key in proxy.generations:
            headers = [*headers, ("x-goog-generation", str(proxy.generations[key]))]
        return status, headers, content

    def _cut_listing(self, key: str, answer: Any) -> Any:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        end = query.get("endOffset", [""])[0]
        status, headers, content = answer
        if status != 200:
            return answer
        about = json.loads(content)
        names = about.get("items", [])
        kept = [x for x in names if key <= x["name"] and (not end or x["name"] < end)]
        return status, headers, json.dumps({**about, "items": kept}).encode()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response(status)
        length = str(len(content))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()


def _find_key(method: str, path: str) -> tuple[str, bool]:
    """Return the key that a request is about, and whether it asks for a listing."""
    parts = urllib.parse.urlsplit(path)
    query = urllib.parse.parse_qs(parts.query)
    if "name" in query:
        return query["name"][0], False
    if "list-type" in query or re.fullmatch(r"/storage/v1/b/[^/]+/o", parts.path):
        return query.get("prefix", query.get("startOffset", [""]))[0], method == "GET"
    name = parts.path.removeprefix(f"/storage/v1/b/{BUCKET}/o/").removeprefix(f"/{BUCKET}/")
    return urllib.parse.unquote(name), False


def _make_error(scheme: str, status: int) -> bytes:
    if scheme == "gs":
        return json.dumps({"error": {"code": status, "message": "a test"}}).encode()
    code = {403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed"}.get(
        status, "SlowDown"
    )
    return f"<Error><Code>{code}</Code><Message>a test</Message></Error>".encode()


@functools.cache
def _make_context() -> Any:
    retries = {"max_retries": 10, "initial_delay": "1ms", "max_delay": "2ms"}
    context = {f"{d}_request_retries": retries for d in ("gcs", "s3")}
    return tensorstore.Context({**context, **path_module.OCDBT_CACHE})


def be_impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Repeat requests soon, and wait for locks for less than a second.

    Returns:
        What to call after the test.
    """
    monkeypatch.setattr(path_module, "make_context", _make_context)
    monkeypatch.setattr("jaxdist._checkpoints.shards.make_context", _make_context)
    monkeypatch.setattr(bucket_lock, "_HELD_SECONDS", 0.4)
    monkeypatch.setattr(bucket_lock, "_RENEWED_SECONDS", 0.05)
    monkeypatch.setattr(bucket_lock, "_LOOK_SECONDS", 0.02)
    path_module._open.cache_clear()
    return path_module._open.cache_clear


def use_store(scheme: str, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """Start the store of this process with one bucket, and set the variables that find it."""
    proxy = _serve(scheme)
    proxy.reset()
    variables = {"TENSORSTORE_GCS_HTTP_URL": proxy.url}
    if scheme == "s3":
        variables = {
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return proxy


# One for all tests of a process: tensorstore reads the address of Google Cloud Storage once.
@functools.cache
def _serve(scheme: str) -> Proxy:
    for name in "werkzeug", "gcp_storage_emulator.storage":
        logging.getLogger(name).setLevel(logging.CRITICAL)
    proxy = Proxy(scheme, _start_s3() if scheme == "s3" else _start_gs())
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    return proxy


def _start_s3() -> int:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as store:
        store.request("PUT", f"/{BUCKET}")
        assert store.getresponse().status == 200
    return port


def _start_gs() -> int:
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    thread: Any = server._api
    thread.daemon = True  # or Python would wait for it at its end
    server.start()
    listening: Any = thread._httpd
    return listening.socket.getsockname()[1]
