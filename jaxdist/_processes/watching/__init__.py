"""Reports what each process of a job is doing, so that no job hangs in silence."""

from jaxdist._processes.watching.current import find_ended as find_ended
from jaxdist._processes.watching.current import start_watching as start_watching
from jaxdist._processes.watching.current import stop_watching as stop_watching
from jaxdist._processes.watching.hang import ABORT_CODE as ABORT_CODE
from jaxdist._processes.watching.waiting import CallOfAll as CallOfAll
from jaxdist._processes.watching.waiting import Waiter as Waiter
from jaxdist._processes.watching.waiting import exchange as exchange
from jaxdist._processes.watching.waiting import exchange_over as exchange_over
from jaxdist._processes.watching.waiting import tell_blame as tell_blame
from jaxdist._processes.watching.waiting import wait_until_ready as wait_until_ready
from jaxdist._processes.watching.whereabouts import HERE as HERE
