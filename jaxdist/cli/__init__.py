"""The command line: `jaxdist train`, `jaxdist plan`, `jaxdist bench`, `jaxdist info`,
`jaxdist resolve`."""

from jaxdist.cli._main import main as main
