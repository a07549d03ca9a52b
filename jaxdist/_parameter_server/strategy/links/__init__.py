"""The servers and workers of a strategy, and the connections to them."""

from jaxdist._parameter_server.strategy.links.local_link import LocalWorkerLink as LocalWorkerLink
from jaxdist._parameter_server.strategy.links.local_link import Note as Note
from jaxdist._parameter_server.strategy.links.tasks import LocalTasks as LocalTasks
from jaxdist._parameter_server.strategy.links.tasks import RemoteTasks as RemoteTasks
from jaxdist._parameter_server.strategy.links.tasks import Tasks as Tasks
