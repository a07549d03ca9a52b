"""A field of a request to parameter servers, and an environment in which jobs run."""

from tools.additions.addition import Addition

FIELD = Addition(
    "a field of a request",
    {},
    {
        "_parameter_server/protocol.py": (
            (
                "\n\nclass Change(msgspec.Struct",
                """    # The dtype in which the rows travel; "" for that of the variable.
    dtype: _Name = ""
""",
            ),
        ),
        "_parameter_server/server/server.py": (
            (
                "            return protocol.Rows(found.peek()[ids], found.version",
                """            if request.dtype:
                sent = found.peek()[ids].astype(request.dtype)
                return protocol.Rows(sent, found.version, self._state.incarnation)
""",
            ),
        ),
    },
    """
import numpy as np
from jaxdist._parameter_server.protocol import Create, Creation, ReadRows
from jaxdist._parameter_server.server import VariableServer, make_handlers
from jaxdist._parameter_server.transport import connect, serve
from jaxdist._parameter_server.variables.remote_server import RemoteServer
server = VariableServer()
listener = serve("127.0.0.1:0", make_handlers(server), layer="grpc")
link = RemoteServer(connect(listener.address, layer="grpc", name="ps 0"), 0)
table = np.arange(6, dtype=np.float32).reshape(3, 2)
link.call(Create([Creation("table", table)]))
rows = link.call(ReadRows("table", np.array([2, 0]), dtype="float16")).rows
assert rows.dtype == np.float16 and rows.tolist() == [[4, 5], [0, 1]], rows
rows = link.call(ReadRows("table", np.array([1]))).rows
assert rows.dtype == np.float32 and rows.tolist() == [[2, 3]]
link.close()
listener.stop()
server.close()
""",
    "Unexpected keyword argument 'dtype'",
)

ENVIRONMENT = Addition(
    "a cluster environment, with files of launch",
    {
        "cluster_resolver/_open_mpi.py": '''"""The tasks of a job that Open MPI has started."""

from collections.abc import Mapping

from jaxdist.cluster_resolver._cluster_spec import ClusterSpec
from jaxdist.cluster_resolver._simple import SimpleClusterResolver

_COUNT, _RANK, _HOSTS = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "MPI_HOSTS"


def find_job(environ: Mapping[str, str]) -> str:
    """Return the variable that shows a job of Open MPI with a list of its hosts."""
    return _HOSTS if _HOSTS in environ and _RANK in environ else ""


def make_open_mpi(environ: Mapping[str, str]) -> SimpleClusterResolver:
    """Return the resolver of such a job."""
    workers = [f"{host}:8470" for host in environ[_HOSTS].split(",")]
    return SimpleClusterResolver(
        ClusterSpec({"worker": workers}), task_type="worker", task_id=int(environ[_RANK])
    )
''',
        "_launching/files/open_mpi.py": '''"""Writes a script for Open MPI."""

import shlex

from jaxdist._launching.files.request import Request, TaskRequest
from jaxdist.errors import LaunchError


def make_script(request: Request) -> str:
    """Return the script."""
    command = shlex.join(["python", *request.arguments])
    return f"#!/bin/bash\\nmpirun -n {request.count} -x MPI_HOSTS {command}\\n"


def refuse_servers(request: TaskRequest) -> str:
    """Refuse a job with parameter servers."""
    raise LaunchError("jaxdist launch --print open_mpi starts equal processes only.")
''',
    },
    {
        "cluster_resolver/_chosen.py": (
            (
                "from jaxdist.cluster_resolver._resolver import",
                "from jaxdist.cluster_resolver._open_mpi import find_job, make_open_mpi\n",
            ),
            (
                '    "tpu": Environment(',
                '    "open_mpi": Environment(make_open_mpi, find_job),\n',
            ),
        ),
        "_launching/files/__init__.py": (
            (
                "from jaxdist._launching.files.request import Request",
                "from jaxdist._launching.files.open_mpi import make_script, refuse_servers\n",
            ),
            (
                '    "skypilot": Target(',
                '    "open_mpi": Target(make_script, refuse_servers, installs=False),\n',
            ),
        ),
    },
    """
import contextlib, io, os
from pathlib import Path
from jaxdist.cli import main
from jaxdist.cluster_resolver import choose_resolver
Path("train.py").write_text("")
def say(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(list(words))
    return out.getvalue()
assert "mpirun -n 2" in say("launch", "-n", "2", "--print", "open_mpi", "train.py")
os.environ |= {"OMPI_COMM_WORLD_RANK": "1", "MPI_HOSTS": "127.0.0.1,127.0.0.2"}
resolver = choose_resolver()
assert (resolver.task_id, resolver.cluster_spec().num_tasks("worker")) == (1, 2)
shown = say("resolve")
assert "open_mpi" in shown and "127.0.0.1:8470" in shown, shown
""",
    "invalid choice: 'open_mpi'",
)
