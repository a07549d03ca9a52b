"""Functions of JAX's array API that do something else, or more, while a step is traced."""

from jaxdist._compat.jnp.constants import check_constants as check_constants
from jaxdist._compat.jnp.inferred_dims import InferredDims as InferredDims
from jaxdist._compat.jnp.inferred_dims import infer_dims as infer_dims
