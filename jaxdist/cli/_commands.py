"""Imports the function of a command when the command runs."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.cli._bench import bench_collectives as bench_collectives
    from jaxdist.cli._examples import show_or_copy as show_or_copy
    from jaxdist.cli._examples import write as write
    from jaxdist.cli._info import show_chips as show_chips
    from jaxdist.cli._info import show_info as show_info
    from jaxdist.cli._lint import lint as lint
    from jaxdist.cli._plan import plan as plan
    from jaxdist.cli._resolve import show_resolved as show_resolved
    from jaxdist.cli._server import run_server as run_server
    from jaxdist.cli._trace import trace as trace
    from jaxdist.cli._train import train as train

_open_late(__name__)
