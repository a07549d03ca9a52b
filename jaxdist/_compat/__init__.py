"""Everything that depends on the version of JAX or Python, and every use of private JAX or Flax.

Each docstring names the change that makes the entry unnecessary. Works with JAX 0.10.2 to
0.12.
"""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._compat.arrays import REJECTS_DELETED_ARRAYS as REJECTS_DELETED_ARRAYS
    from jaxdist._compat.arrays import describe_arrays as describe_arrays
    from jaxdist._compat.arrays import get_shards as get_shards
    from jaxdist._compat.arrays import has_deleted as has_deleted
    from jaxdist._compat.arrays import is_committed as is_committed
    from jaxdist._compat.arrays import is_concrete as is_concrete
    from jaxdist._compat.arrays import is_ready as is_ready
    from jaxdist._compat.arrays import make_uncommitted as make_uncommitted
    from jaxdist._compat.arrays import put_uncommitted as put_uncommitted
    from jaxdist._compat.arrays import set_variables as set_variables
    from jaxdist._compat.binding import bind_like as bind_like
    from jaxdist._compat.binding import make_weak as make_weak
    from jaxdist._compat.binding import rewrite_derivatives as rewrite_derivatives
    from jaxdist._compat.binding import rewrite_jvp as rewrite_jvp
    from jaxdist._compat.binding import use_source_of as use_source_of
    from jaxdist._compat.branches import cond_in_part as cond_in_part
    from jaxdist._compat.branches import find_part as find_part
    from jaxdist._compat.coordination import get_coordination_client as get_coordination_client
    from jaxdist._compat.coordination import get_gloo_addresses as get_gloo_addresses
    from jaxdist._compat.coordination import get_process_numbers as get_process_numbers
    from jaxdist._compat.coordination import get_service_port as get_service_port
    from jaxdist._compat.coordination import have_backends_started as have_backends_started
    from jaxdist._compat.coordination import host_coordination_service as host_coordination_service
    from jaxdist._compat.coordination import (
        hosts_coordination_service as hosts_coordination_service,
    )
    from jaxdist._compat.coordination import set_gloo_address as set_gloo_address
    from jaxdist._compat.coordination import uses_gloo as uses_gloo
    from jaxdist._compat.dispatch import SUPPORTS_SUB_BYTE_LAYOUTS as SUPPORTS_SUB_BYTE_LAYOUTS
    from jaxdist._compat.dispatch import Answer as Answer
    from jaxdist._compat.dispatch import InvalidNumberError as InvalidNumberError
    from jaxdist._compat.dispatch import answer_miss as answer_miss
    from jaxdist._compat.dispatch import call_without_layout_checks as call_without_layout_checks
    from jaxdist._compat.dispatch import check_numbers as check_numbers
    from jaxdist._compat.dispatch import fast_call_record as fast_call_record
    from jaxdist._compat.dispatch import is_checking_numbers as is_checking_numbers
    from jaxdist._compat.dispatch import make_dispatcher as make_dispatcher
    from jaxdist._compat.handlers import HeldTracer as HeldTracer
    from jaxdist._compat.handlers import call_in_trace as call_in_trace
    from jaxdist._compat.handlers import call_outside_traces as call_outside_traces
    from jaxdist._compat.handlers import evaluate as evaluate
    from jaxdist._compat.handlers import op_by_op as op_by_op
    from jaxdist._compat.in_steps import InferredDims as InferredDims
    from jaxdist._compat.in_steps import check_constants as check_constants
    from jaxdist._compat.in_steps import infer_dims as infer_dims
    from jaxdist._compat.in_steps import keep_zero_derivatives as keep_zero_derivatives
    from jaxdist._compat.lowering import compute_on_host as compute_on_host
    from jaxdist._compat.lowering import constrain_tiles as constrain_tiles
    from jaxdist._compat.lowering import describe_lowered as describe_lowered
    from jaxdist._compat.lowering import mend_scatters as mend_scatters
    from jaxdist._compat.lowering import omit_open_constraints as omit_open_constraints
    from jaxdist._compat.meshes import call_with_auto_types as call_with_auto_types
    from jaxdist._compat.meshes import find_spec_of_type as find_spec_of_type
    from jaxdist._compat.meshes import get_context_mesh as get_context_mesh
    from jaxdist._compat.meshes import get_explicit_mesh as get_explicit_mesh
    from jaxdist._compat.meshes import outside_of_meshes as outside_of_meshes
    from jaxdist._compat.meshes import rewrite_shardings as rewrite_shardings
    from jaxdist._compat.meshes import use_abstract_mesh as use_abstract_mesh
    from jaxdist._compat.meshes import use_no_mesh as use_no_mesh
    from jaxdist._compat.nnx import find_lent as find_lent
    from jaxdist._compat.nnx import get_held as get_held
    from jaxdist._compat.nnx import is_distant as is_distant
    from jaxdist._compat.nnx import leave_out_padding as leave_out_padding
    from jaxdist._compat.nnx import let_variables_hold as let_variables_hold
    from jaxdist._compat.nnx import set_held as set_held
    from jaxdist._compat.nnx import show_as_array as show_as_array
    from jaxdist._compat.nnx import show_distant_objects as show_distant_objects
    from jaxdist._compat.nnx import watch_made_variables as watch_made_variables
    from jaxdist._compat.nnx import weigh_batch_statistics as weigh_batch_statistics
    from jaxdist._compat.options import KEEPS_BARRIERS as KEEPS_BARRIERS
    from jaxdist._compat.options import SKIP_CUDA_CHECKS as SKIP_CUDA_CHECKS
    from jaxdist._compat.options import are_set_by_flags as are_set_by_flags
    from jaxdist._compat.options import compile_anew as compile_anew
    from jaxdist._compat.options import compile_for_gpu_plan as compile_for_gpu_plan
    from jaxdist._compat.options import find_cuda_plugin as find_cuda_plugin
    from jaxdist._compat.options import format_flags as format_flags
    from jaxdist._compat.options import get_exact_options as get_exact_options
    from jaxdist._compat.options import get_gpu_plan_options as get_gpu_plan_options
    from jaxdist._compat.options import has_compilation_cache as has_compilation_cache
    from jaxdist._compat.options import make_gpu_devices as make_gpu_devices
    from jaxdist._compat.options import outside_of_cache as outside_of_cache
    from jaxdist._compat.options import use_exact_partitioner as use_exact_partitioner
    from jaxdist._compat.programs import CALLS as CALLS
    from jaxdist._compat.programs import add_body_inputs as add_body_inputs
    from jaxdist._compat.programs import append_inputs as append_inputs
    from jaxdist._compat.programs import discharge_refs as discharge_refs
    from jaxdist._compat.programs import drop_results as drop_results
    from jaxdist._compat.programs import drop_unused as drop_unused
    from jaxdist._compat.programs import expand_operations as expand_operations
    from jaxdist._compat.programs import get_scan_counts as get_scan_counts
    from jaxdist._compat.programs import has_side_effects as has_side_effects
    from jaxdist._compat.programs import has_write_to as has_write_to
    from jaxdist._compat.programs import is_mutable as is_mutable
    from jaxdist._compat.programs import is_ref as is_ref
    from jaxdist._compat.programs import move_constants_to_inputs as move_constants_to_inputs
    from jaxdist._compat.programs import remove_placeholders as remove_placeholders
    from jaxdist._compat.programs import stage_with_params as stage_with_params
    from jaxdist._compat.row_numbers import ROW_NUMBERS_TAG as ROW_NUMBERS_TAG
    from jaxdist._compat.row_numbers import are_row_numbers as are_row_numbers
    from jaxdist._compat.row_numbers import unwrap_row_numbers as unwrap_row_numbers
    from jaxdist._compat.row_numbers import wrap_row_numbers as wrap_row_numbers
    from jaxdist._compat.settings import ThreadSettings as ThreadSettings
    from jaxdist._compat.settings import read_context as read_context
    from jaxdist._compat.settings import read_settings as read_settings
    from jaxdist._compat.sources import NO_SOURCE as NO_SOURCE
    from jaxdist._compat.sources import PACKAGE as PACKAGE
    from jaxdist._compat.sources import explain_tree_errors as explain_tree_errors
    from jaxdist._compat.sources import find_caller_of_library as find_caller_of_library
    from jaxdist._compat.sources import find_callers_line as find_callers_line
    from jaxdist._compat.sources import find_callers_of_library as find_callers_of_library
    from jaxdist._compat.sources import find_functions as find_functions
    from jaxdist._compat.sources import find_line_in_user_code as find_line_in_user_code
    from jaxdist._compat.sources import find_line_of_error as find_line_of_error
    from jaxdist._compat.sources import find_line_of_model as find_line_of_model
    from jaxdist._compat.sources import find_shape_asked_for as find_shape_asked_for
    from jaxdist._compat.sources import find_source as find_source
    from jaxdist._compat.sources import get_current_source as get_current_source
    from jaxdist._compat.sources import hide_frames as hide_frames
    from jaxdist._compat.sources import is_called_by_layer as is_called_by_layer
    from jaxdist._compat.sources import is_called_from_folder as is_called_from_folder
    from jaxdist._compat.sources import is_from_file as is_from_file
    from jaxdist._compat.sources import is_from_folder as is_from_folder
    from jaxdist._compat.sources import is_from_library as is_from_library
    from jaxdist._compat.sources import is_from_mean as is_from_mean
    from jaxdist._compat.sources import is_transposed as is_transposed
    from jaxdist._compat.sources import with_hidden_frames as with_hidden_frames
    from jaxdist._compat.tracing import enable_jit as enable_jit
    from jaxdist._compat.tracing import find_calling_jacobian as find_calling_jacobian
    from jaxdist._compat.tracing import find_mapped_axis as find_mapped_axis
    from jaxdist._compat.tracing import get_current_trace as get_current_trace
    from jaxdist._compat.tracing import is_inside_trace as is_inside_trace
    from jaxdist._compat.tracing import is_jit_disabled as is_jit_disabled
    from jaxdist._compat.tracing import is_live as is_live
    from jaxdist._compat.tracing import is_mapped as is_mapped
    from jaxdist._compat.tracing import is_staged as is_staged
    from jaxdist._compat.tracing import is_staged_in as is_staged_in
    from jaxdist._compat.tracing import must_interpret as must_interpret
    from jaxdist._compat.tracing import set_in_block as set_in_block
    from jaxdist._compat.tracing import typed_like as typed_like

_open_late(__name__)
