"""Finds which process failed first, and what its output says about it."""

from jaxdist._launching.first_cause.first_cause import Cause as Cause
from jaxdist._launching.first_cause.first_cause import find_first_cause as find_first_cause
from jaxdist._launching.first_cause.first_cause import find_lost as find_lost
