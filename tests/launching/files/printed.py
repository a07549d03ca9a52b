"""Files that `jaxdist launch --print` prints, and running them here."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonschema
import pytest
import yaml

from jaxdist.cli import main

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
SCRIPT = str(HERE / "cluster_script.py")


def print_file(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what `jaxdist launch` prints."""
    code = main(["launch", *argv])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def check_schema(document: Any, name: str) -> None:
    """Raise unless a document has the form that a schema of this folder describes."""
    schema = json.loads((HERE / f"{name}_schema.json").read_text())
    jsonschema.validate(document, schema, jsonschema.Draft202012Validator)


def read_documents(text: str) -> list[Any]:
    """Return the documents of YAML."""
    return list(yaml.safe_load_all(text))


def clean_environment() -> dict[str, str]:
    """Return the environment of the tests, without what would change a job."""
    foreign = ("JAXDIST_", "TF_CONFIG", "XLA_FLAGS", "SLURM_", "KUBERNETES_", "JAX_NUM_CPU")
    found = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    path = os.pathsep.join([str(ROOT), found.get("PYTHONPATH", "")])
    return {**found, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def add_program(folder: pathlib.Path, name: str, command: Sequence[str]) -> None:
    """Write a program that runs a command of Python with its own arguments."""
    program = folder / name
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {" ".join(command)} "$@"\n')
    program.chmod(0o755)


@contextlib.contextmanager
def start_bash(script: str, environment: Mapping[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """Run a script; it and all that it started are killed when the block ends."""
    process = subprocess.Popen(
        ["bash", "-c", script],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def check_syntax(script: str) -> None:
    """Raise unless bash can read a script."""
    checked = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
