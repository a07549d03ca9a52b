"""`jaxdist.Server`: a parameter server, or a worker, as a task of a cluster."""

from jaxdist._parameter_server.tasks.server import Server as Server
from jaxdist._parameter_server.tasks.server_def import ServerDef as ServerDef
