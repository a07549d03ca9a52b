"""Explains strategies, arrays and programs to their users."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._explain.profile import BATCH as BATCH
    from jaxdist._explain.profile import DISPATCH as DISPATCH
    from jaxdist._explain.profile import STEP as STEP
    from jaxdist._explain.profile import StepTimes as StepTimes
    from jaxdist._explain.profile import read_step_times as read_step_times
    from jaxdist._explain.report import explain as explain

_open_late(__name__)
