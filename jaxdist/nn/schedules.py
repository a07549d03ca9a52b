"""Schedules of pipelines, as tables: which stage does what at which tick."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._pipeline import gpipe as gpipe
    from jaxdist._pipeline import one_f_one_b as one_f_one_b
    from jaxdist._pipeline import zero_bubble as zero_bubble

_open_late(__name__)
