"""Hosts for tests are cut off, connected again, and throttled."""

import subprocess
import sys
import textwrap

import pytest

from tests.hosts.hosts import Host, make_hosts, needs_hosts

# Tests with hosts wait for each other.
pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(600)]

_BYTES = 400_000
_SEND = f"""
    import socket, sys, time
    try:
        began = time.monotonic()
        with socket.create_connection((sys.argv[1], 5000), timeout=2) as line:
            line.settimeout(30)
            line.sendall(bytes({_BYTES}))
            line.shutdown(socket.SHUT_WR)
            line.recv(1)
        print(time.monotonic() - began)
    except TimeoutError:
        print("no answer")
"""
_TAKE = """
    import socket, sys
    server = socket.create_server((sys.argv[1], 5000))
    print("ready", flush=True)
    while True:
        line, _ = server.accept()
        with line:
            while line.recv(65536):
                pass
"""


def _start(host: Host, script: str, *arguments: str) -> "subprocess.Popen[str]":
    command = host.enter([sys.executable, "-c", textwrap.dedent(script), *arguments])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_host_is_cut_off_connected_again_and_throttled() -> None:
    with make_hosts(2) as (first, second):
        server = _start(second, _TAKE, second.address)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"

        def send() -> str:
            with _start(first, _SEND, second.address) as client:
                said, _ = client.communicate(timeout=60)
            return said.strip()

        assert float(send()) < 1
        second.cut()
        assert send() == "no answer"
        second.mend()
        assert float(send()) < 1
        first.throttle("1mbit")
        # 3.2 Mbit, of which 32 KB pass at once.
        assert float(send()) > 2
        server.kill()
        server.wait()
        server.stdout.close()
