"""The command line: `jaxdist train`, `jaxdist plan`, `jaxdist bench`, `jaxdist launch`,
`jaxdist info`."""

from jaxdist.cli._main import main as main
