"""Trace, analyse, compile, call."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._program.arguments.arguments import Static as Static
    from jaxdist._program.arguments.arguments import argument_name as argument_name
    from jaxdist._program.arguments.arguments import is_unit as is_unit
    from jaxdist._program.arguments.arguments import unflatten as unflatten
    from jaxdist._program.arguments.compiler_options import ON_SERVERS as ON_SERVERS
    from jaxdist._program.arguments.compiler_options import CompilerOptions as CompilerOptions
    from jaxdist._program.arguments.compiler_options import (
        as_compiler_options as as_compiler_options,
    )
    from jaxdist._program.arguments.compiler_options import format_options as format_options
    from jaxdist._program.arguments.compiler_options import (
        log_options_without_effect as log_options_without_effect,
    )
    from jaxdist._program.arguments.exact import exact_structure as exact_structure
    from jaxdist._program.arguments.in_slot import InSlot as InSlot
    from jaxdist._program.arguments.in_slot import make_in_slot as make_in_slot
    from jaxdist._program.arguments.in_slot import must_move as must_move
    from jaxdist._program.arguments.options import RunOptions as RunOptions
    from jaxdist._program.arguments.options import check_options as check_options
    from jaxdist._program.arguments.retrace import Compilation as Compilation
    from jaxdist._program.compile.program import Program as Program
    from jaxdist._program.compile.saving import check_path as check_path
    from jaxdist._program.compile.without_device import check_can_be_saved as check_can_be_saved
    from jaxdist._program.functions.bound_variables import BatchLeaf as BatchLeaf
    from jaxdist._program.functions.function import Function as Function
    from jaxdist._program.functions.function import function as function
    from jaxdist._program.functions.trace import FunctionTrace as FunctionTrace
    from jaxdist._program.functions.whole_call import WholeCall as WholeCall
    from jaxdist._program.functions.whole_call import WholeCalls as WholeCalls
    from jaxdist._program.jaxprs import primitives as primitives
    from jaxdist._program.jaxprs.control_flow import Scan as Scan
    from jaxdist._program.jaxprs.control_flow import While as While
    from jaxdist._program.jaxprs.interpreter import ForwardAnalysis as ForwardAnalysis
    from jaxdist._program.jaxprs.interpreter import Interpreter as Interpreter
    from jaxdist._program.jaxprs.subprograms import contains as contains
    from jaxdist._program.jaxprs.subprograms import get_consts as get_consts
    from jaxdist._program.jaxprs.subprograms import iterate_constants as iterate_constants
    from jaxdist._program.jaxprs.subprograms import iterate_equations as iterate_equations
    from jaxdist._program.jaxprs.subprograms import iterate_programs as iterate_programs
    from jaxdist._program.jaxprs.subprograms import iterate_with_inner as iterate_with_inner
    from jaxdist._program.jaxprs.subprograms import open_jaxpr as open_jaxpr
    from jaxdist._program.logical.logical_device import assigned as assigned
    from jaxdist._program.logical.logical_device import laid_out as laid_out
    from jaxdist._program.logical.logical_device import on_device as on_device
    from jaxdist._program.logical.placed_work import PlacedWork as PlacedWork
    from jaxdist._program.nnx.closures import find_closure_values as find_closure_values
    from jaxdist._program.nnx.graph import is_same_but_for_states as is_same_but_for_states
    from jaxdist._program.op_by_op import EAGERLY as EAGERLY
    from jaxdist._program.op_by_op import run_eagerly as run_eagerly
    from jaxdist._program.op_by_op import steps_run_eagerly as steps_run_eagerly
    from jaxdist._program.proof.dependence import Dependence as Dependence
    from jaxdist._program.proof.dependence import DependenceAnalysis as DependenceAnalysis
    from jaxdist._program.proof.dependence import growth as growth
    from jaxdist._program.proof.dependence import is_weighted_sum as is_weighted_sum
    from jaxdist._program.proof.replication import ReplicationAnalysis as ReplicationAnalysis
    from jaxdist._program.proof.replication import TracedCollective as TracedCollective
    from jaxdist._program.report import CompiledProgram as CompiledProgram
    from jaxdist._program.report import CompiledRow as CompiledRow
    from jaxdist._program.report import Explanation as Explanation
    from jaxdist._program.report import find_spread as find_spread
    from jaxdist._program.report import list_divided_work as list_divided_work
    from jaxdist._program.report import predict_seconds as predict_seconds
    from jaxdist._program.run.runner import Runner as Runner
    from jaxdist._program.run.same_arguments import LaterCalls as LaterCalls
    from jaxdist._program.state.carried import find_carried_arguments as find_carried_arguments
    from jaxdist._program.trace.trace import Signature as Signature
    from jaxdist._program.variables.access import UpdateOfCopies as UpdateOfCopies
    from jaxdist._program.variables.access import collect_rows as collect_rows
    from jaxdist._program.variables.access import variables_as_values as variables_as_values

_open_late(__name__)
