"""The variables of one server: values, changes, closures counted once, staleness, snapshots."""

from jaxdist._parameter_server.server.changing import TOO_STALE as TOO_STALE
from jaxdist._parameter_server.server.messages import make_handlers as make_handlers
from jaxdist._parameter_server.server.programs import compute_digest as compute_digest
from jaxdist._parameter_server.server.requests import Change as Change
from jaxdist._parameter_server.server.requests import Changed as Changed
from jaxdist._parameter_server.server.requests import Creation as Creation
from jaxdist._parameter_server.server.requests import UpdateRegistration as UpdateRegistration
from jaxdist._parameter_server.server.requests import Values as Values
from jaxdist._parameter_server.server.server import VariableServer as VariableServer
