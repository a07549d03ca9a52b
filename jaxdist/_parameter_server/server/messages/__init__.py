"""The messages of a server, and calls that take longer than the deadline of a message."""

from jaxdist._parameter_server.server.messages.handlers import make_handlers as make_handlers
