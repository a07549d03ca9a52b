"""Messages between the tasks of a job: in one process, or by gRPC."""

from jaxdist._parameter_server.transport.connect import check_addresses as check_addresses
from jaxdist._parameter_server.transport.connect import connect as connect
from jaxdist._parameter_server.transport.connect import serve as serve
from jaxdist._parameter_server.transport.limits import Limits as Limits
from jaxdist._parameter_server.transport.message import Channel as Channel
from jaxdist._parameter_server.transport.message import Handler as Handler
from jaxdist._parameter_server.transport.message import Listener as Listener
from jaxdist._parameter_server.transport.message import Message as Message
from jaxdist._parameter_server.transport.security import Security as Security
from jaxdist._parameter_server.transport.security import read_security as read_security
