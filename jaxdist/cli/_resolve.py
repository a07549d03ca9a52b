"""`jaxdist resolve`: shows which task of its job this process would be."""

import argparse
import os
import sys

from rich.console import Console

from jaxdist._reports import Table, as_text, find_screen_width
from jaxdist._resolve import SOURCES, Network, Options, choose_source, make_report, make_resolver
from jaxdist.cluster_resolver import find_source


def add_resolve(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    shared: argparse.ArgumentParser,
) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "resolve",
        parents=[shared],
        allow_abbrev=False,
        help="who this process would be in its job, and what looks wrong",
        description=(
            "Print who this process would be in its job, who is process 0, what would be bound, "
            "and what looks wrong. Starts nothing. The exit code is 0, 1 with warnings, 2 with "
            "errors."
        ),
    )
    parser.add_argument("--from", dest="source", choices=SOURCES, help="by default what is there")
    parser.add_argument("--probe", action="store_true", help="connect to process 0, once")
    parser.add_argument("--task-type", metavar="JOB", help="the job of this process")
    parser.add_argument("--task-id", type=int, metavar="N", help="its number in the job")
    parser.add_argument("--port", type=int, help="slurm, kubernetes, gce: the port of addresses")
    pods = parser.add_argument_group("kubernetes")
    pods.add_argument("--service", help="headless service of an indexed Job")
    pods.add_argument("--processes", type=int, metavar="N", help="pods of an indexed Job or JobSet")
    pods.add_argument("--processes-in-job", type=int, metavar="N", help="pods of each Job")
    pods.add_argument("--label", action="append", default=[], help="list pods with this label")
    pods.add_argument("--off-cluster", action="store_true", help="list pods from elsewhere")
    group = parser.add_argument_group("gce")
    for name in ("--project", "--zone", "--instance-group"):
        group.add_argument(name)
    parser.set_defaults(command=show_resolved)


def show_resolved(
    arguments: argparse.Namespace, console: Console | None = None, network: Network | None = None
) -> int:
    """Print which task of its job this process would be.

    Returns:
        The exit code: 0, or 1 with warnings, or 2 with errors.
    """
    console = console or Console(file=sys.stdout)
    source = arguments.source or choose_source(os.environ)
    options = Options(
        port=arguments.port,
        labels=tuple(arguments.label),
        is_off_cluster=arguments.off_cluster,
        service=arguments.service,
        processes=arguments.processes,
        processes_in_job=arguments.processes_in_job,
        project=arguments.project,
        zone=arguments.zone,
        instance_group=arguments.instance_group,
        task_type=arguments.task_type,
        task_id=arguments.task_id,
    )
    resolver = make_resolver(source, os.environ, options)
    shown = source if arguments.source else _describe_source(source)
    report = make_report(shown, resolver, os.environ, network or Network(), probe=arguments.probe)
    parts: list[Table | str] = [
        Table("This process in its job", ("what", "found"), report.lines),
        *(f"{finding.level}: {finding.text}" for finding in report.findings),
    ]
    if not report.findings:
        parts.append("Nothing looks wrong.")
    text = as_text(parts, find_screen_width())
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return report.exit_code


def _describe_source(source: str) -> str:
    """Return the source of the tasks, and the variable that selects it."""
    because = find_source(os.environ).because
    return f"{source}, by {because}" if because and because != "TF_CONFIG" else source
