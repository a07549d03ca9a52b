"""Starting the processes of a job on this machine."""

from jaxdist._launching.ports import find_free_ports as find_free_ports
