"""Changes functions of JAX while a step is traced or runs op by op."""

from jaxdist._compat.in_steps.constants import check_constants as check_constants
from jaxdist._compat.in_steps.inferred_dims import InferredDims as InferredDims
from jaxdist._compat.in_steps.inferred_dims import infer_dims as infer_dims
from jaxdist._compat.in_steps.zero_derivatives import keep_zero_derivatives as keep_zero_derivatives
