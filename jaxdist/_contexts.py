"""Values of the current thread that are parts of the keys of JAX's caches.

JAX traces every function again after one of them is made, so `_first_import` makes all of them
with the first import of JAX.
"""

import jax

# The number of a trace whose jaxprs JAX must not find again; see `fresh_trace_key`.
TRACE_NUMBER = jax.make_user_context(None)
# Whether constants of a trace are checked; see `_compat/in_steps/constants.py`.
CHECKS_CONSTANTS = jax.make_user_context(False)
# What decides how a trace rewrites shardings: a jitted function that was traced before, with other
# rewriting, would keep the layouts of that trace; see `_compat/meshes.py`.
REWRITING = jax.make_user_context(None)
