"""The package grpcio, and what both sides of a connection agree on."""

import importlib
import os
from typing import Any

from jaxdist._parameter_server.transport.stream import CHUNK
from jaxdist.errors import MissingExtraError

SERVICE = "jaxdist.Transport"
# Written next to each other: one number for all that both sides must read alike.
WIRE = "3"

WIRE_KEY = "jaxdist-wire"
CALL_KEY = "jaxdist-call-bin"
SECRET_KEY = "jaxdist-secret-bin"
CALL_BYTES = 16

OPTIONS = (
    # A chunk has its checksum in front.
    ("grpc.max_receive_message_length", CHUNK + 64),
    # gRPC reads so far ahead; its default waits for the other side several times in a chunk.
    ("grpc.http2.lookahead_bytes", 8 * CHUNK),
)


def load_grpc(module: str = "grpc") -> Any:
    """Import gRPC, or one of the modules that come with the extra.

    Raises:
        MissingExtraError: It is not installed.
    """
    # Otherwise it prints a line for each connection that a server closes.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return importlib.import_module(module)
    except ImportError:
        package = "grpcio-health-checking" if module.startswith("grpc_health") else "grpcio"
        raise MissingExtraError(
            f"Calls between processes need the package {package}, and it is not installed.\n\n"
            "jaxdist is installed without its optional packages.\n\n"
            "Install it with: pip install grpcio grpcio-health-checking flatbuffers zlib-ng"
        ) from None
