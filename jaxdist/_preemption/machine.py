"""Checks whether this is a machine of Google Compute Engine, and whether it will be ended."""

import logging
import os
import urllib.error
import urllib.request
from collections.abc import Callable

# Maps a path such as `instance/maintenance-event` to the response of the metadata server.
ReadMetadata = Callable[[str], str]

_LOG = logging.getLogger("jaxdist")
_PRODUCT = "/sys/class/dmi/id/product_name"
_EVENT = "TERMINATE_ON_HOST_MAINTENANCE"
_SECONDS = 5.0


def find_metadata_server(product: str = _PRODUCT) -> ReadMetadata | None:
    """Return a function that reads the metadata server; None outside of Compute Engine.

    The firmware identifies the platform, so nothing is sent over the network on other machines.

    Args:
        product: The file with the name of the machine's product.
    """
    try:
        with open(product) as file:
            name = file.read()
    except OSError:
        return None
    return read_metadata if "Google Compute Engine" in name else None


def read_metadata(path: str) -> str:
    """Return the response of the metadata server, at the address `GCE_METADATA_IP` if set."""
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        text: str = answer.read().decode()
    return text


def has_maintenance_event(read: ReadMetadata) -> bool:
    """Whether the machine will be ended for maintenance.

    If the server does not answer, the result is False; the next query is a second later.
    """
    try:
        return read("instance/maintenance-event").strip() == _EVENT
    except (OSError, urllib.error.URLError) as error:
        _LOG.warning("The metadata server of this machine did not answer: %s", error)
        return False
