"""The command line: `jaxdist train`, `plan`, `bench`, `launch`, `lint`, `resolve` and `info`."""

from jaxdist.cli._main import main as main
