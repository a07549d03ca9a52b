"""The metadata server of Google Compute Engine, which each machine has at an address of its own."""

import os
import urllib.request

_SECONDS = 5.0
# The address is one of the machine itself: a proxy that the environment names (`http_proxy`) would
# answer for another machine, or not at all.
_WITHOUT_PROXY = urllib.request.ProxyHandler({})


def make_url(path: str) -> str:
    """Return the address of a value; `GCE_METADATA_IP` may name another server."""
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    return f"http://{host}/computeMetadata/v1/{path}"


def read_metadata(path: str) -> str:
    """Return the response of the metadata server for a path such as `instance/zone`.

    Raises:
        OSError: The server did not answer, or has no such value.
    """
    request = urllib.request.Request(make_url(path), headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(_WITHOUT_PROXY)
    with opener.open(request, timeout=_SECONDS) as answer:
        text: str = answer.read().decode()
    return text
