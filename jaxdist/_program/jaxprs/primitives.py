"""Tables of JAX's primitives for the replication analysis, and a primitive of jaxdist.

The tables are allow-lists: the analysis assumes of any other primitive that its results may differ.
`tests/program/` runs every family of primitives in random programs, and compares the facts with
the real values of the replicas.
"""

from typing import Any

import jax
from jax.extend.core import Primitive

from jaxdist import _compat

# Deterministic functions of their operands alone, without sub-programs, effects or hidden state.
FIRST_ORDER = frozenset(
    """
    abs acos acosh add add_any and approx_top_k argmax argmin asin asinh atan atan2 atanh
    bessel_i0e bessel_i1e bitcast_convert_type broadcast_in_dim broadcast_to cbrt ceil cholesky
    cholesky_update clamp clz complex concatenate conj conv_general_dilated convert_element_type
    copy cos cosh cumlogsumexp cummax cummin cumprod cumsum device_put digamma div dot_general
    dynamic_slice dynamic_update_slice eig eigh empty2 eq eq_to erf erf_inv erfc exp exp2 expm1 fft
    floor gather ge geqp3 geqrf gt hessenberg householder_product igamma igamma_grad_a igammac
    imag integer_pow iota iota_2x32_shape is_finite le le_to lgamma log log1p log2 logistic lt
    lt_to lu lu_pivots_to_permutation max min mul mulhi name ne neg nextafter not
    one_minus_square or ormqr pad pcast philox2x32 philox4x32 platform_index
    polygamma polynomial population_count pow pvary qr ragged_dot_general random_bits
    random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
    real reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum
    reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor
    regularized_incomplete_beta rem reshape reshard rev rng_bit_generator round rsqrt scatter
    scatter-add scatter-max scatter-min scatter-mul scatter-sub schur select_and_gather_add
    select_and_scatter select_and_scatter_add select_n sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt square
    squeeze stack stop_gradient sub svd symmetric_product tan tanh threefry2x32 threefry4x32
    tile top_k transpose triangular_solve tridiagonal tridiagonal_solve unstack xor zeros_like
    zeta
    """.split()
)

# Each result is a function of the operand at the same position.
PAIRWISE = frozenset(
    """
    optimization_barrier jaxdist_logical_device jaxdist_logical_layout jaxdist_reduced_pieces
    """.split()
)

# They return their operand, and change at most its layout over the devices.
LAYOUT_ONLY = frozenset({"sharding_constraint", "pcast", "pvary", "reshard", "mesh_cast"})

# Decompositions of matrices that have several results, and are custom calls on CPUs and GPUs.
DECOMPOSITIONS = frozenset("eig eigh geqp3 geqrf hessenberg lu qr schur svd tridiagonal".split())

SUMS = frozenset({"psum", "psum2", "psum_invariant"})
SCATTERS = frozenset({"psum_scatter", "reduce_scatter"})

# Collectives with equal results on all replicas of their axes, unless they have groups. The last
# is in the trace for a group of replicas whose number of rows differs from the others'.
REPLICATING = frozenset(
    """
    all_gather all_gather_invariant pbroadcast pmax pmin psum psum2 psum_invariant
    jaxdist_uneven_all_gather
    """.split()
)

# Primitives whose results differ between replicas, even for equal operands.
VARYING = frozenset(
    """
    all_to_all axis_index pgather ppermute precv psend psum_scatter ragged_all_to_all reduce_scatter
    """.split()
)

COLLECTIVES = (REPLICATING | VARYING) - {"axis_index"}

# The parameter that holds the program of each call: JAX's own calls, `shard_map`, and jaxdist's
# all-reduce, which may consist of several operations.
CALLS = {**_compat.CALLS, "shard_map": "jaxpr", "jaxdist_all_reduce": "program"}


PLACEHOLDER = Primitive("jaxdist_placeholder")
PLACEHOLDER.def_abstract_eval(
    lambda *, number, shape, dtype, weak_type: jax.core.ShapedArray(
        shape, dtype, weak_type=weak_type
    )
)


def placeholder(
    trace: Any, number: int, shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False
) -> Any:
    """Return a traced value of this shape and dtype in the outermost program of a trace.

    Args:
        trace: The trace of that program; the caller may be in a trace inside it.
        number: The number of the placeholder in that trace.
        shape: The shape in the program.
        dtype: The dtype of the value.
        weak_type: Whether JAX treats its dtype as that of a Python number.
    """
    params = {"number": number, "shape": shape, "dtype": dtype, "weak_type": weak_type}
    return _compat.call_in_trace(trace, lambda: PLACEHOLDER.bind(**params))
