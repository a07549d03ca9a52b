"""Commands of pages: bash blocks run with programs that only record how they were called.

Each recorded `jaxdist` is parsed, its configuration is read with its `--set`, and `TF_CONFIG` is
what a resolver understands. In the text, every option of an inline `jaxdist ...` exists.
"""

import argparse
import contextlib
import importlib.util
import io
import itertools
import pathlib
import re
import shlex
import subprocess

import pytest

from jaxdist.cli._main import _make_parser
from jaxdist.cluster_resolver import TFConfigClusterResolver
from jaxdist.jobs import load_job_config
from tests.test_documentation import PAGES, ROOT, read_blocks

# Programs that blocks call. A new one fails as "command not found", until it is here.
_PROGRAMS = ("jaxdist", "python", "python3", "pip", "make", "gcloud", "ray", "srun")
_RECORD = """#!/bin/bash
number=$(ls "$RECORD" | wc -l)
{ printf '%s\\0' "${TF_CONFIG-}" "${0##*/}" "$@"; } > "$RECORD/$(printf %04d "$number")"
if [ "${0##*/} ${1-}" = "jaxdist new" ]; then mkdir -p "$2"; fi
"""


def _read_calls(block: str, folder: pathlib.Path) -> list[list[str]]:
    """Run a block, and return the TF_CONFIG, the name and the arguments of each program."""
    record = folder / "record"
    record.mkdir()
    for place in ("bin", ".venv/bin"):
        (folder / place).mkdir(parents=True)
        for name in _PROGRAMS:
            program = folder / place / name
            program.write_text(_RECORD)
            program.chmod(0o755)
    environ = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "RECORD": str(record), "HOME": "/root"}
    command = ["bash", "-euo", "pipefail", "-c", block]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [file.read_text().split("\0")[:-1] for file in sorted(record.iterdir())]


def _parse(arguments: list[str]) -> argparse.Namespace:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return _make_parser().parse_args(arguments)
    except SystemExit:
        raise AssertionError(f"{shlex.join(arguments)}: {said.getvalue()}") from None


def _find_fault(tf_config: str, name: str, *arguments: str) -> str | None:
    """Return what is wrong with one call, or None."""
    if tf_config and not TFConfigClusterResolver(environ={"TF_CONFIG": tf_config}).cluster_spec():
        return "TF_CONFIG has no tasks"
    if name == "jaxdist":
        parsed = _parse([*arguments])
        config = getattr(parsed, "config", "")
        if config.startswith("configs/"):
            load_job_config(ROOT / config, parsed.overrides)
    elif name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        return None if set(arguments) <= set(targets) else f"no target {arguments}"
    elif name.startswith("python") and arguments[0] == "-m":
        return None if importlib.util.find_spec(arguments[1]) else f"no module {arguments[1]}"
    elif name == "pip":
        extras = re.findall(r"\.\[([\w,-]+)\]", " ".join(arguments))
        listed = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
        return None if set(extras) <= set(listed) else f"no extra {extras}"
    return None


def _check_block(block: str, folder: pathlib.Path) -> None:
    calls = _read_calls(block, folder)
    assert calls != []
    assert [fault for call in calls if (fault := _find_fault(*call))] == []


_BLOCKS = [
    pytest.param("\n".join(block.lines), id=f"{page.relative_to(ROOT)}:{block.start}")
    for page in PAGES
    for block in read_blocks(page.read_text())
    if block.language == "bash"
]


@pytest.mark.parametrize("block", _BLOCKS)
def test_the_commands_of_a_block_are_understood(block: str, tmp_path: pathlib.Path) -> None:
    _check_block(block, tmp_path)


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ("jaxdist plan configs/digits_mirrored.toml --topologies v5e:2x2", "--topologies"),
        ("jaxdist train configs/digits_mirrored.toml --set training.step=3", "step"),
        ("export TF_CONFIG='{\"cluster\": {}'\njaxdist resolve", "not valid JSON"),
        ("make tests", "no target"),
        ("pip install '.[example]'", "no extra"),
        ("jaxdists info", "command not found"),
    ],
)
def test_a_planted_fault_of_a_block_is_found(
    block: str, fault: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(Exception, match=re.escape(fault)):
        _check_block(block, tmp_path)


def _list_options() -> dict[str, set[str]]:
    """The options of each command of `jaxdist`."""
    parser = _make_parser()
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {
        name: {option for action in command._actions for option in action.option_strings}
        | {o for inner in _list_inner(command) for a in inner._actions for o in a.option_strings}
        for name, command in commands.choices.items()
    }


def _list_inner(command: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [a for a in command._actions if isinstance(a, argparse._SubParsersAction)]
    return [inner for action in found for inner in action.choices.values()]


def _find_unknown(text: str) -> list[str]:
    """Commands and options of an inline `jaxdist ...` that do not exist."""
    options = _list_options()
    unknown: list[str] = []
    for written in re.findall(r"`(?:[A-Z_]+=\S+ )?jaxdist ([a-z][^`\n]*)`", text):
        command, *rest = written.split()
        if command not in options:
            unknown.append(written)
            continue
        # Behind a script, a module or `train` are the arguments of those.
        known = options[command] | (options["train"] if command == "launch" else set())
        own = itertools.takewhile(lambda word: word != "-m" and not word.endswith(".py"), rest)
        given = {word.partition("=")[0] for word in own if re.match(r"--[a-z]", word)}
        unknown += sorted(f"{command} {option}" for option in given - known)
    return unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_of_an_inline_command_exists(page: pathlib.Path) -> None:
    assert _find_unknown(page.read_text()) == []


def test_an_unknown_option_of_an_inline_command_is_found() -> None:
    assert _find_unknown("`jaxdist plan x.toml --sweeps` and `jaxdist play`") == [
        "plan --sweeps",
        "play",
    ]
    assert _find_unknown("`jaxdist launch -n 2 train x.toml --set a.b=1`") == []
    assert _find_unknown("`jaxdist launch -n 2 script.py --own 1`") == []
