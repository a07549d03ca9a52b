"""`jaxdist server`: runs one parameter server or worker."""

import argparse

import jax

from jaxdist import Server
from jaxdist.cli._server_options import SERVER_JOBS, add_server_options
from jaxdist.cluster_resolver import choose_resolver
from jaxdist.errors import ArgumentError, ClusterError


def make_server_arguments() -> argparse.Namespace:
    """Return the arguments of the task that TF_CONFIG names."""
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    return parser.parse_args([])


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
            "The variable has the addresses of all tasks.\n\n"
            'Set for instance TF_CONFIG=\'{"cluster": {"ps": ["host0:2222"], "worker": '
            '["host1:2222"]}, "task": {"type": "ps", "index": 0}}\'.'
        )
    job = arguments.type or resolver.task_type
    if job not in SERVER_JOBS:
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
