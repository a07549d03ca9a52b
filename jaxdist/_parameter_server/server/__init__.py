"""The variables of one server: values, changes, closures counted once, staleness, snapshots."""

from jaxdist._parameter_server.server.changing import TOO_STALE as TOO_STALE
from jaxdist._parameter_server.server.handlers import make_handlers as make_handlers
from jaxdist._parameter_server.server.programs import compute_digest as compute_digest
from jaxdist._parameter_server.server.server import VariableServer as VariableServer
from jaxdist._parameter_server.server.stored import check_arithmetic as check_arithmetic
