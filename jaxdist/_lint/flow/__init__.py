"""Reads what a program does, without running it."""

from jaxdist._lint.flow.facts import Averaged as Averaged
from jaxdist._lint.flow.facts import Events as Events
from jaxdist._lint.flow.facts import Function as Function
from jaxdist._lint.flow.facts import LocalMean as LocalMean
from jaxdist._lint.flow.facts import MetricUpdate as MetricUpdate
from jaxdist._lint.flow.facts import Reduced as Reduced
from jaxdist._lint.flow.facts import Reduction as Reduction
from jaxdist._lint.flow.facts import Run as Run
from jaxdist._lint.flow.facts import read_leaves as read_leaves
from jaxdist._lint.flow.objects import UPDATES as UPDATES
from jaxdist._lint.flow.reader import read_program as read_program
