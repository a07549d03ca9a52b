"""Processes that join, or cannot."""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxdist import _processes
from jaxdist._called import called
from jaxdist._processes.joining import claims, connection
from jaxdist.errors import JaxdistError


def _describe_with(**other: Any) -> None:
    """Let this process say something else about itself."""
    described = claims.describe_this_process
    connection.describe_this_process = lambda index, addresses: described(index, addresses) | other


@called("Strategy")
def join(how: str = "") -> dict[str, Any]:
    """Join the job of TF_CONFIG, with something wrong in process 1; return the error, if any."""
    how = how or os.environ.get("HOW", "")
    config = json.loads(os.environ["TF_CONFIG"])
    addresses, index = config["cluster"]["worker"], config["task"]["index"]
    is_wrong = index == 1
    if how == "same index" and index == 2:
        index = 1
    if how == "other cluster" and is_wrong:
        addresses = [*addresses, "127.0.0.1:1"]
    if how == "other version" and is_wrong:
        _describe_with(jax="0.0.1")
    if how == "backend started":
        jax.devices()
    if how in ("missing", "interrupted") and is_wrong:
        return {"error": None}
    if how == "bad address":
        addresses = [*addresses[:-1], "no port"]
    if how == "says another index" and is_wrong:
        # It answers at its own address that it is another task.
        _describe_with(index=5)
    if how == "interrupted" and not is_wrong:
        # Process 1 does not come, so this one still waits then.
        threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
    try:
        process = _processes.join(addresses, index)
        if how == "twice":
            again = _processes.join(addresses, index)
            assert again == process
        if how == "another job":
            _processes.join([*addresses, "127.0.0.1:1"], index)
    except JaxdistError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except KeyboardInterrupt:
        with socket.create_server(("127.0.0.1", int(addresses[0].rpartition(":")[2]))):
            return {"error": "KeyboardInterrupt", "message": "its port is free again"}
    return {"error": None, "index": process.index, "count": process.count}


@called("Strategy")
def use_store_after_leaving() -> dict[str, str]:
    """Return the error of each request of a store whose service has ended."""
    config = json.loads(os.environ["TF_CONFIG"])
    _processes.join(config["cluster"]["worker"], 0)
    store = _processes.get_store()
    assert store is not None
    store.set("a/b", "text")
    assert store.wait_for("a/b", 1) == "text"
    jax.distributed.shutdown()
    requests: dict[str, Callable[[], Any]] = {
        "set": lambda: store.set("a/c", "text"),
        "get": lambda: store.get("a/b"),
        "wait_for": lambda: store.wait_for("a/b", 1),
        "list": lambda: store.list("a/"),
        "delete": lambda: store.delete("a/b"),
    }
    errors = {}
    for name, request in requests.items():
        try:
            errors[name] = f"no error, but {request()!r}"
        except JaxdistError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors
