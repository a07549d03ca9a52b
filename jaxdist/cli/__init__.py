"""The command line: `jaxdist train`, `new`, `plan`, `launch` and others."""

from jaxdist.cli._main import main as main
