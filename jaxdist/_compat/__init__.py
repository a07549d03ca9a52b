"""The one room that knows which JAX is installed; every use of private JAX or Flax is here.

Each entry says what it waits for. Works with JAX 0.10.2 to 0.12.
"""

from jaxdist._compat._arrays import DELETED_ARE_REFUSED as DELETED_ARE_REFUSED
from jaxdist._compat._arrays import any_deleted as any_deleted
from jaxdist._compat._arrays import as_uncommitted as as_uncommitted
from jaxdist._compat._arrays import is_committed as is_committed
from jaxdist._compat._arrays import pieces_of as pieces_of
from jaxdist._compat._arrays import put_uncommitted as put_uncommitted
from jaxdist._compat._binding import at_source_of as at_source_of
from jaxdist._compat._binding import bind_here as bind_here
from jaxdist._compat._binding import bind_like as bind_like
from jaxdist._compat._binding import rewritten_derivatives as rewritten_derivatives
from jaxdist._compat._binding import rewritten_jvp as rewritten_jvp
from jaxdist._compat._dispatch import Miss as Miss
from jaxdist._compat._dispatch import fast_call_record as fast_call_record
from jaxdist._compat._dispatch import make_dispatcher as make_dispatcher
from jaxdist._compat._held_tracer import HeldTracer as HeldTracer
from jaxdist._compat._host import on_host as on_host
from jaxdist._compat._lowering import without_open_constraints as without_open_constraints
from jaxdist._compat._op_by_op import Handler as Handler
from jaxdist._compat._op_by_op import evaluate as evaluate
from jaxdist._compat._op_by_op import inside as inside
from jaxdist._compat._op_by_op import op_by_op as op_by_op
from jaxdist._compat._op_by_op import outside as outside
from jaxdist._compat._options import BARRIERS_HOLD as BARRIERS_HOLD
from jaxdist._compat._options import are_set_by_flags as are_set_by_flags
from jaxdist._compat._options import exact_options as exact_options
from jaxdist._compat._programs import CALLS as CALLS
from jaxdist._compat._programs import body_with_inputs as body_with_inputs
from jaxdist._compat._programs import call_traced as call_traced
from jaxdist._compat._programs import is_changed as is_changed
from jaxdist._compat._programs import is_ref as is_ref
from jaxdist._compat._programs import scan_counts as scan_counts
from jaxdist._compat._programs import with_constants_as_inputs as with_constants_as_inputs
from jaxdist._compat._programs import with_inputs as with_inputs
from jaxdist._compat._programs import without_placeholders as without_placeholders
from jaxdist._compat._programs import without_refs as without_refs
from jaxdist._compat._sources import NO_SOURCE as NO_SOURCE
from jaxdist._compat._sources import callers_line as callers_line
from jaxdist._compat._sources import is_transposed as is_transposed
from jaxdist._compat._sources import source_of as source_of
from jaxdist._compat._tiles import constrain_tiles as constrain_tiles
from jaxdist._compat._tracebacks import hide_frames as hide_frames
from jaxdist._compat._tracebacks import hides_frames as hides_frames
from jaxdist._compat._tracing import current_trace as current_trace
from jaxdist._compat._tracing import inside_trace as inside_trace
from jaxdist._compat._tracing import is_disabled_jit as is_disabled_jit
from jaxdist._compat._tracing import is_live as is_live
from jaxdist._compat._tracing import is_mapped as is_mapped
from jaxdist._compat._tracing import is_staged_in as is_staged_in
from jaxdist._compat._tracing import must_interpret as must_interpret
from jaxdist._compat._tracing import settings_of_thread as settings_of_thread
from jaxdist._compat._tracing import with_jit as with_jit
from jaxdist._compat._variables import set_variables as set_variables
