"""`max_staleness`: which reads and changes wait, and for which closures."""

from jaxdist._parameter_server.server.staleness.admission import Admission as Admission
from jaxdist._parameter_server.server.staleness.admission import GetVersions as GetVersions
from jaxdist._parameter_server.server.staleness.registrations import ClosureId as ClosureId
