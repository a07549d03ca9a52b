"""`jaxdist resolve`: shows which task of its job this process would be."""

import argparse
import os
import sys

from rich.console import Console

from jaxdist._reports import Table, as_text, find_screen_width
from jaxdist._resolve import Network, choose_source, make_report, make_resolver
from jaxdist.cluster_resolver import ENVIRONMENTS, find_source


def show_resolved(arguments: argparse.Namespace) -> int:
    """Print which task of its job this process would be.

    Returns:
        The exit code: 0, or 1 with warnings, or 2 with errors.
    """
    source = arguments.source or choose_source(os.environ)
    environment = ENVIRONMENTS[source]
    names = [*environment.options, *(["port"] if environment.has_port else [])]
    options = {name: getattr(arguments, name) for name in names}
    task = arguments.task_type, arguments.task_id
    resolver = make_resolver(source, os.environ, *task, **options)
    shown = source if arguments.source else _describe_source(source)
    report = make_report(shown, resolver, os.environ, Network(), probe=arguments.probe)
    parts: list[Table | str] = [
        Table("This process in its job", ("what", "found"), report.lines),
        *(f"{finding.level}: {finding.text}" for finding in report.findings),
    ]
    if not report.findings:
        parts.append("Nothing looks wrong.")
    text = as_text(parts, find_screen_width())
    Console(file=sys.stdout).print(text, markup=False, highlight=False, soft_wrap=True)
    return report.exit_code


def _describe_source(source: str) -> str:
    """Return the source of the tasks, and the variable that selects it."""
    because = find_source(os.environ).because
    return f"{source}, by {because}" if because and because != "TF_CONFIG" else source
