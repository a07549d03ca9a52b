"""Checks that the user requests: gradients against one device, and drift between replicas."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._checks.drift import DriftChecks as DriftChecks
    from jaxdist._checks.gradient_report import GradientReport as GradientReport
    from jaxdist._checks.gradients import check_gradients as check_gradients

_open_late(__name__)
