"""`experimental.rpc`: functions of one process that other processes call by name."""

from jaxdist._parameter_server.rpc.client import Client as Client
from jaxdist._parameter_server.rpc.connection import StatusOrResult as StatusOrResult
from jaxdist._parameter_server.rpc.server import Server as Server
