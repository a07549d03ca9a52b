"""Options of a parameter server or worker, for parsers and for tasks that TF_CONFIG names."""

import argparse

SERVER_JOBS = ("ps", "worker")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a parameter server or worker."""
    parser.add_argument(
        "--type", choices=SERVER_JOBS, help="the job of this task; that of TF_CONFIG if left out"
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
        help="where a parameter server writes snapshots; it starts from the newest",
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
            "a worker reports to the first parameter server, and joins a training that is already "
            "running"
        ),
    )
