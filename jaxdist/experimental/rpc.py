"""Documented names under `tf.distribute.experimental.rpc`."""

from jaxdist._parameter_server.rpc import Client as Client
from jaxdist._parameter_server.rpc import Server as Server
from jaxdist._parameter_server.rpc import StatusOrResult as StatusOrResult
