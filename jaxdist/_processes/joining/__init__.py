"""Joins the other processes of the job, and leaves them."""

from jaxdist._processes.joining.connection import connect as connect
from jaxdist._processes.joining.connection import get_own_address as get_own_address
from jaxdist._processes.joining.connection import is_connected as is_connected
from jaxdist._processes.joining.connection import join as join
from jaxdist._processes.joining.launched import SERVICE as SERVICE
from jaxdist._processes.joining.leaving import at_leaving as at_leaving
from jaxdist._processes.joining.leaving import leave as leave
