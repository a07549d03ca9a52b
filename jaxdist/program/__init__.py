"""Trace, analyse, compile, call."""

from jaxdist.program._compiled_program import CompiledProgram as CompiledProgram
from jaxdist.program._eagerly import EAGERLY as EAGERLY
from jaxdist.program._eagerly import run_eagerly as run_eagerly
from jaxdist.program._eagerly import steps_run_eagerly as steps_run_eagerly
from jaxdist.program._explanation import Explanation as Explanation
from jaxdist.program._function import Function as Function
from jaxdist.program._function import function as function
from jaxdist.program._logical_device import assigned as assigned
from jaxdist.program._logical_device import on_device as on_device
from jaxdist.program._logical_layout import laid_out as laid_out
from jaxdist.program._options import RunOptions as RunOptions
from jaxdist.program._placed_work import PlacedWork as PlacedWork
from jaxdist.program._program import Program as Program
from jaxdist.program._replication import TracedCollective as TracedCollective
from jaxdist.program._runner import Runner as Runner
from jaxdist.program._variables_as_values import variables_as_values as variables_as_values
from jaxdist.program._variables_update import UpdateOfCopies as UpdateOfCopies
