"""The queue of closures, their results and errors, and the threads of the workers."""

from jaxdist._parameter_server.coordinator.cluster_coordinator import (
    ClusterCoordinator as ClusterCoordinator,
)
from jaxdist._parameter_server.coordinator.cluster_coordinator import call_at_exit as call_at_exit
from jaxdist._parameter_server.coordinator.per_worker import PerWorkerDataset as PerWorkerDataset
from jaxdist._parameter_server.coordinator.per_worker import PerWorkerIterator as PerWorkerIterator
from jaxdist._parameter_server.coordinator.per_worker import PerWorkerValues as PerWorkerValues
from jaxdist._parameter_server.coordinator.protocols import IteratorOf as IteratorOf
from jaxdist._parameter_server.coordinator.protocols import Joining as Joining
from jaxdist._parameter_server.coordinator.protocols import ServerReport as ServerReport
from jaxdist._parameter_server.coordinator.protocols import WorkerLink as WorkerLink
from jaxdist._parameter_server.coordinator.remote_value import RemoteValue as RemoteValue
from jaxdist._parameter_server.coordinator.retries import Backoff as Backoff
from jaxdist._parameter_server.coordinator.retries import first_line as first_line
from jaxdist._parameter_server.coordinator.retries import (
    read_wait_settings as read_wait_settings,
)
from jaxdist._parameter_server.coordinator.scheduled import (
    FinishedNumbers as FinishedNumbers,
)
from jaxdist._parameter_server.coordinator.scheduled import Statistics as Statistics
from jaxdist._parameter_server.variables.servers import Fence as Fence
from jaxdist._parameter_server.worker.worker_index import check_on_worker as check_on_worker
from jaxdist._parameter_server.worker.worker_index import (
    experimental_get_current_worker_index as experimental_get_current_worker_index,
)
from jaxdist._parameter_server.worker.worker_index import on_worker as on_worker
from jaxdist._parameter_server.worker.worker_index import raise_outside as raise_outside
