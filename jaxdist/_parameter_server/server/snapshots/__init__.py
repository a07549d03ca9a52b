"""Snapshots of a server: what they hold, how they are read, and when they are written."""

from jaxdist._parameter_server.server.snapshots.files import Captured as Captured
from jaxdist._parameter_server.server.snapshots.files import capture as capture
from jaxdist._parameter_server.server.snapshots.keeper import SnapshotKeeper as SnapshotKeeper
