"""The command line: `jaxdist train`, `jaxdist info`."""

from jaxdist.cli._main import main as main
