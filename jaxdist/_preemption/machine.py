"""Whether this is a machine of Google Compute Engine, and whether it will be ended."""

import logging
import os
import urllib.error
import urllib.request
from collections.abc import Callable

# From a path such as `instance/maintenance-event` to the text of the metadata server.
ReadMetadata = Callable[[str], str]

_LOG = logging.getLogger("jaxdist")
_PRODUCT = "/sys/class/dmi/id/product_name"
_EVENT = "TERMINATE_ON_HOST_MAINTENANCE"
_SECONDS = 5.0


def find_metadata_server(product: str = _PRODUCT) -> ReadMetadata | None:
    """Return how to read the metadata server of this machine; None outside of Compute Engine.

    The firmware says where the machine runs, so nothing is sent elsewhere.

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
    """Return a text of the metadata server; `GCE_METADATA_IP` is its address if it is set."""
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        text: str = answer.read().decode()
    return text


def has_maintenance_event(read: ReadMetadata) -> bool:
    """Whether the machine will be ended for maintenance.

    A server that does not answer says nothing: the next question is a second later.
    """
    try:
        return read("instance/maintenance-event").strip() == _EVENT
    except (OSError, urllib.error.URLError) as error:
        _LOG.warning("The metadata server of this machine did not answer: %s", error)
        return False
