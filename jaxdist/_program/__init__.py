"""Trace, analyse, compile, call."""

from jaxdist._program.arguments.arguments import Static as Static
from jaxdist._program.arguments.arguments import unflatten as unflatten
from jaxdist._program.arguments.in_slot import InSlot as InSlot
from jaxdist._program.arguments.options import RunOptions as RunOptions
from jaxdist._program.arguments.options import check_options as check_options
from jaxdist._program.compile.program import Program as Program
from jaxdist._program.functions.function import Function as Function
from jaxdist._program.functions.function import function as function
from jaxdist._program.jaxprs.interpreter import Interpreter as Interpreter
from jaxdist._program.logical.logical_device import assigned as assigned
from jaxdist._program.logical.logical_device import on_device as on_device
from jaxdist._program.logical.logical_layout import laid_out as laid_out
from jaxdist._program.logical.placed_work import PlacedWork as PlacedWork
from jaxdist._program.nnx.closures import find_closure_values as find_closure_values
from jaxdist._program.op_by_op.eagerly import EAGERLY as EAGERLY
from jaxdist._program.op_by_op.eagerly import run_eagerly as run_eagerly
from jaxdist._program.op_by_op.eagerly import steps_run_eagerly as steps_run_eagerly
from jaxdist._program.proof.replication import TracedCollective as TracedCollective
from jaxdist._program.report.compiled_program import CompiledProgram as CompiledProgram
from jaxdist._program.report.explanation import Explanation as Explanation
from jaxdist._program.report.matching import CompiledRow as CompiledRow
from jaxdist._program.run.runner import Runner as Runner
from jaxdist._program.state.carried import find_carried_arguments as find_carried_arguments
from jaxdist._program.trace.trace import Signature as Signature
from jaxdist._program.variables.access import UpdateOfCopies as UpdateOfCopies
from jaxdist._program.variables.access import variables_as_values as variables_as_values
