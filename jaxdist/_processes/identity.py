"""What a process tells the others of itself when it joins them."""

import hashlib
import json
import os
import platform
import socket
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib


def describe_this_process(index: int, addresses: Sequence[str]) -> dict[str, Any]:
    """Return the number, host, versions and cluster of this process."""
    return {
        "index": index,
        "count": len(addresses),
        "cluster": hash_cluster(addresses),
        "addresses": list(addresses) if len(addresses) <= 64 else [],
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def hash_cluster(addresses: Sequence[str]) -> str:
    """Return a text that is equal for equal lists of addresses only."""
    return hashlib.sha256(json.dumps(list(addresses)).encode()).hexdigest()[:16]
