"""The arguments that all commands with a configuration share."""

import argparse


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the configuration file, and the option that overrides its entries."""
    parser.add_argument(
        "config",
        help=(
            "a TOML file; or the name of one that comes with jaxdist, such as digits_mirrored: "
            "jaxdist examples lists them"
        ),
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override an entry of the file; may be given many times",
    )
