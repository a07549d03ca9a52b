"""Runs `jaxdist lint` on paths and texts, and reads what it prints."""

import contextlib
import dataclasses
import io
import json
import pathlib
import tempfile
from collections.abc import Sequence

from jaxdist.cli import main


@dataclasses.dataclass(frozen=True)
class Finding:
    """An entry of `jaxdist lint --format json`."""

    path: str
    cell: int | None
    line: int
    column: int
    code: str
    name: str
    found: str
    rule: str
    fix: str
    page: str


def lint_paths(*paths: pathlib.Path) -> list[Finding]:
    """Return what the command finds in files and folders, and check its exit code."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["lint", *map(str, paths), "--format", "json"])
    findings = [Finding(**entry) for entry in json.loads(printed.getvalue())]
    is_unreadable = any(finding.code == "JD000" for finding in findings)
    assert code == (2 if is_unreadable else 1 if findings else 0)
    return findings


def lint_texts(texts: Sequence[str]) -> list[list[Finding]]:
    """Return what one run of the command finds in each of several programs."""
    found: list[list[Finding]] = [[] for _ in texts]
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder) / f"{number}.py" for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        for finding in lint_paths(*paths):
            found[int(pathlib.Path(finding.path).stem)].append(finding)
    return found


def lint_text(text: str) -> list[Finding]:
    """Return what the command finds in a program."""
    return lint_texts([text])[0]
