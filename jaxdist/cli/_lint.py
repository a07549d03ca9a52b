"""`jaxdist lint`: finds mistakes in programs that the guides warn about."""

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

import jaxdist
from jaxdist._lint import UNREADABLE, Located, lint_paths
from jaxdist._reports import as_text, find_screen_width, join_items
from jaxdist.errors import MissingNameError

EXIT_FOUND = 1
EXIT_UNREADABLE = 2


def spell(name: str) -> tuple[str, str]:
    """Return the spelling in jaxdist of a name of `tf.distribute`, or what to use instead.

    Args:
        name: The name without `tf.distribute`, such as `experimental.TPUStrategy`.

    Returns:
        The spelling, or ''; and the advice if there is no spelling.

    Example:
        >>> spell("experimental.TPUStrategy")
        ('jaxdist.experimental.TPUStrategy', '')
        >>> spell("contrib.TPUStrategy")[1].partition(";")[0]
        'It is jaxdist.TPUStrategy(resolver)'
    """
    found: object = jaxdist
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except MissingNameError as error:
            return "", " ".join(str(error).split("\n\n")[1:])
        except AttributeError:
            return "", "nothing has this name in jaxdist; the page lists all names."
    return f"jaxdist.{name}", ""


def lint(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Print the findings of the rules.

    Returns:
        The exit code: 0, 1 if something was found, 2 if a file cannot be read.
    """
    found, files = lint_paths(arguments.paths, spell)
    if arguments.format == "json":
        print(json.dumps([_as_record(one) for one in found], indent=2))
    else:
        _show(found, files, console or Console(file=sys.stdout, soft_wrap=True, highlight=False))
    if any(one.finding.rule is UNREADABLE for one in found):
        return EXIT_UNREADABLE
    return EXIT_FOUND if found else 0


def _as_record(one: Located) -> dict[str, str | int | None]:
    finding = one.finding
    return {
        "path": str(one.path),
        "cell": one.cell,
        "line": one.line,
        "column": finding.column,
        "code": finding.rule.code,
        "name": finding.rule.name,
        "found": finding.found,
        "rule": finding.rule.reason,
        "fix": finding.fix,
        "page": finding.rule.page,
    }


def _show(found: Sequence[Located], files: int, console: Console) -> None:
    width = find_screen_width()
    for one in found:
        finding, rule = one.finding, one.finding.rule
        # A place that contains spaces stays whole, so that an editor can open it.
        words = f"{rule.code} {rule.name}: {finding.found}".split(" ")
        lines = join_items([f"{one.place}:", *words], width, " ", indent=4)
        head = Text("\n".join(lines))
        head.stylize("bold", 0, len(one.place))
        start = head.plain.index(rule.code, len(one.place))
        head.stylize("bold red", start, start + len(rule.code))
        fix = Text(as_text([f"    fix: {finding.fix}"], width))
        fix.stylize("green", len("    fix: "))
        console.print(head, soft_wrap=True)
        _print_plain(f"    rule: {rule.reason}", console)
        console.print(fix, soft_wrap=True)
        _print_plain(f"    see: {rule.page}", console)
    read = f"{files} file{'s' if files != 1 else ''}"
    places = len({one.path for one in found})
    if found:
        count = f"{len(found)} finding{'s' if len(found) != 1 else ''}"
        _print_plain(f"{count} in {places} of {read}.", console)
    else:
        _print_plain(f"Nothing found in {read}.", console)


def _print_plain(text: str, console: Console) -> None:
    console.print(Text(as_text([text], find_screen_width())), soft_wrap=True)
