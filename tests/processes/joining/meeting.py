"""Processes that join, or cannot."""

import json
import os
from typing import Any

import jax

from jaxdist import _processes
from jaxdist._processes.joining import claims, connection
from jaxdist.errors import JaxdistError


def _describe_with(**other: Any) -> None:
    """Let this process say something else about itself."""
    described = claims.describe_this_process
    connection.describe_this_process = lambda index, addresses: described(index, addresses) | other


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
    if how == "missing" and is_wrong:
        return {"error": None}
    if how == "bad address":
        addresses = [*addresses[:-1], "no port"]
    if how == "says another index" and is_wrong:
        # It answers at its own address that it is another task.
        _describe_with(index=5)
    try:
        process = _processes.join("Strategy", addresses, index)
        if how == "twice":
            again = _processes.join("Strategy", addresses, index)
            assert again == process
        if how == "another job":
            _processes.join("Strategy", [*addresses, "127.0.0.1:1"], index)
    except JaxdistError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": None, "index": process.index, "count": process.count}
