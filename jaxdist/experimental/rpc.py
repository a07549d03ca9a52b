"""Documented names under `tf.distribute.experimental.rpc`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._parameter_server.rpc import Client as Client
    from jaxdist._parameter_server.rpc import Server as Server
    from jaxdist._parameter_server.rpc import StatusOrResult as StatusOrResult

_open_late(__name__)
