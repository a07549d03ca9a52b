"""Messages between the tasks of a job: in one process, or by gRPC."""

from jaxdist._parameter_server.transport.channel import Channel as Channel
from jaxdist._parameter_server.transport.channel import Handler as Handler
from jaxdist._parameter_server.transport.channel import Listener as Listener
from jaxdist._parameter_server.transport.message import Message as Message
