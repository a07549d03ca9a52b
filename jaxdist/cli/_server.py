"""`jaxdist server`: runs one parameter server or worker."""

import argparse

import jax

from jaxdist import Server
from jaxdist.cluster_resolver import choose_resolver
from jaxdist.errors import ArgumentError, ClusterError

_JOBS = ("ps", "worker")


def add_server(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    shared: argparse.ArgumentParser,
) -> None:
    """Add the arguments of `jaxdist server`."""
    parser = commands.add_parser(
        "server",
        parents=[shared],
        allow_abbrev=False,
        help="run a parameter server or a worker of a cluster",
        description=(
            "Run one task of the cluster that TF_CONFIG describes, until the process is ended. "
            "JAXDIST_SECRET_FILE or JAXDIST_SECRET has the secret of the job, which a task needs "
            "at an address that other machines reach."
        ),
    )
    _add_options(parser)
    parser.set_defaults(command=run_server)


def make_server_arguments() -> argparse.Namespace:
    """Return the arguments of the task that TF_CONFIG names."""
    parser = argparse.ArgumentParser()
    _add_options(parser)
    return parser.parse_args([])


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--type", choices=_JOBS, help="the job of this task; that of TF_CONFIG if left out"
    )
    parser.add_argument(
        "--index", type=int, metavar="N", help="its number; that of TF_CONFIG if left out"
    )
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="NAME",
        help="a worker may call dataset functions of this module; may be given several times",
    )
    parser.add_argument(
        "--snapshot-directory",
        metavar="DIR",
        help="a parameter server writes snapshots here, and begins with the newest",
    )
    parser.add_argument(
        "--snapshot-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="how often, if something has changed; 60 if left out",
    )
    parser.add_argument(
        "--announce",
        action="store_const",
        const=True,
        help=(
            "a worker tells the first parameter server that it is there, and takes part in a "
            "training that runs already"
        ),
    )


def run_server(arguments: argparse.Namespace) -> int:
    """Run the task, and return when it has ended.

    Raises:
        ArgumentError: The task is neither a parameter server nor a worker.
        ClusterError: TF_CONFIG has no cluster, or the address is in use.
    """
    resolver = choose_resolver()
    cluster = resolver.cluster_spec()
    if not cluster:
        raise ClusterError(
            "jaxdist server found no cluster in the environment variable TF_CONFIG.\n\n"
            "It has the addresses of all tasks.\n\n"
            'Set for instance TF_CONFIG=\'{"cluster": {"ps": ["host0:2222"], "worker": '
            '["host1:2222"]}, "task": {"type": "ps", "index": 0}}\'.'
        )
    job = arguments.type or resolver.task_type
    if job not in _JOBS:
        raise ArgumentError(
            f"jaxdist server was started as a task of the job {job!r}.\n\n"
            "It runs parameter servers (ps) and workers; a chief runs the program of the job.\n\n"
            "Pass --type ps or --type worker, and --index; or set the task in TF_CONFIG."
        )
    if job == "ps" and getattr(jax.config, "jax_platforms", None) is None:
        # Compute on the CPU: the accelerators of the machine belong to the workers.
        jax.config.update("jax_platforms", "cpu")
    index = resolver.task_id if arguments.index is None else arguments.index
    server = Server(
        cluster,
        job,
        index,
        snapshot_directory=arguments.snapshot_directory,
        snapshot_seconds=arguments.snapshot_seconds,
        modules=arguments.module,
        announce=arguments.announce,
    )
    try:
        server.join()
    finally:
        server.stop()
    return 0
