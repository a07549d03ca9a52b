"""The processes of a job: which one this is, and how they join, agree, and leave.

No other room uses `jax.distributed` or asks JAX for the number of this process.
"""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._processes.addresses import describe_addresses as describe_addresses
    from jaxdist._processes.addresses import find_bind_address as find_bind_address
    from jaxdist._processes.addresses import format_address as format_address
    from jaxdist._processes.addresses import is_listening as is_listening
    from jaxdist._processes.addresses import is_loopback as is_loopback
    from jaxdist._processes.addresses import listen as listen
    from jaxdist._processes.addresses import parse_address as parse_address
    from jaxdist._processes.addresses import split_address as split_address
    from jaxdist._processes.agreement import Agreement as Agreement
    from jaxdist._processes.agreement import find_odd_ones as find_odd_ones
    from jaxdist._processes.agreement import get_agreement as get_agreement
    from jaxdist._processes.joining import SERVICE as SERVICE
    from jaxdist._processes.joining import at_leaving as at_leaving
    from jaxdist._processes.joining import is_connected as is_connected
    from jaxdist._processes.joining import leave as leave
    from jaxdist._processes.own_address import INTERFACE as INTERFACE
    from jaxdist._processes.own_address import Machine as Machine
    from jaxdist._processes.own_address import OwnAddress as OwnAddress
    from jaxdist._processes.own_address import find_own_address as find_own_address
    from jaxdist._processes.own_address import is_chosen as is_chosen
    from jaxdist._processes.process import Process as Process
    from jaxdist._processes.process import get_current_process as get_current_process
    from jaxdist._processes.process import get_process_of_job as get_process_of_job
    from jaxdist._processes.settings import Settings as Settings
    from jaxdist._processes.settings import get_settings as get_settings
    from jaxdist._processes.settings import processes as processes
    from jaxdist._processes.settings import variable_of as variable_of
    from jaxdist._processes.store import CoordinationStore as CoordinationStore
    from jaxdist._processes.store import LocalStore as LocalStore
    from jaxdist._processes.store import Store as Store
    from jaxdist._processes.store import get_store as get_store
    from jaxdist._processes.watching import ABORT_CODE as ABORT_CODE
    from jaxdist._processes.watching import HERE as HERE
    from jaxdist._processes.watching import CallOfAll as CallOfAll
    from jaxdist._processes.watching import Waiter as Waiter
    from jaxdist._processes.watching import exchange as exchange
    from jaxdist._processes.watching import exchange_over as exchange_over
    from jaxdist._processes.watching import find_ended as find_ended
    from jaxdist._processes.watching import start_watching as start_watching
    from jaxdist._processes.watching import stop_watching as stop_watching
    from jaxdist._processes.watching import tell_blame as tell_blame
    from jaxdist._processes.watching import wait_until_ready as wait_until_ready
    from jaxdist._processes.watching.current import connect as connect
    from jaxdist._processes.watching.current import join as join
    from jaxdist._processes.watching.current import watch as watch
    from jaxdist._processes.watching.stacks import format_stack as format_stack

_open_late(__name__)
