"""The arguments that all commands with a configuration have."""

import argparse


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the configuration file, and the option that overrides its entries."""
    parser.add_argument("config", help="a TOML file such as configs/digits_mirrored.toml")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override an entry of the file; may be given many times",
    )
