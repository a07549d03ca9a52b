"""The same order of rows in all processes of a strategy."""

import json

import numpy as np

from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import get_agreement

_CHANNEL = "keras_shuffle"


def share_random_state(layout: ReplicaMesh, method: str) -> None:
    """Make NumPy's global random state, with which Keras shuffles, that of process 0."""
    agreement = get_agreement() if layout.is_shared else None
    if agreement is None:
        return
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 (Keras uses it)
    own = json.dumps([name, np.asarray(keys).tolist(), position, has_gauss, gauss])
    said = agreement.gather(_CHANNEL, own, None, purpose=f"the order of rows in {method}")
    name, keys, position, has_gauss, gauss = json.loads(said[0])
    state = (name, np.array(keys, np.uint32), position, has_gauss, gauss)
    np.random.set_state(state)  # noqa: NPY002 (Keras uses it)
