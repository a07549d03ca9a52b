"""Checks of a step that the user asks for: gradients against one device, replicas that differ."""

from jaxdist._checks.drift import DriftChecks as DriftChecks
from jaxdist._checks.gradient_report import GradientReport as GradientReport
from jaxdist._checks.gradients import check_gradients as check_gradients
