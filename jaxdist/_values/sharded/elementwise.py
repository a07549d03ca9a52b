"""The primitives that may run on pieces of an array instead of the whole array."""

# Each element of a result depends only on the elements of the operands at the same index (or on
# scalar operands), and no parameter holds a shape. This is an allow-list: a primitive that is not
# listed, such as one of a newer JAX, gets the whole array.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv
    erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p log2 logistic
    lt max min mul ne neg nextafter not or population_count pow real reduce_precision rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeros_like
    """.split()
)
