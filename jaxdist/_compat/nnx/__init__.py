"""Variables of Flax NNX, beyond their public interface."""

from jaxdist._compat.nnx.assigned import let_variables_hold as let_variables_hold
from jaxdist._compat.nnx.batch_statistics import leave_out_padding as leave_out_padding
from jaxdist._compat.nnx.batch_statistics import weigh_batch_statistics as weigh_batch_statistics
from jaxdist._compat.nnx.distant_values import find_lent as find_lent
from jaxdist._compat.nnx.distant_values import get_held as get_held
from jaxdist._compat.nnx.distant_values import is_distant as is_distant
from jaxdist._compat.nnx.distant_values import offer_to_distant as offer_to_distant
from jaxdist._compat.nnx.distant_values import set_held as set_held
from jaxdist._compat.nnx.distant_values import show_as_array as show_as_array
from jaxdist._compat.nnx.distant_values import show_distant_objects as show_distant_objects
from jaxdist._compat.nnx.parameters import watch_made_variables as watch_made_variables
