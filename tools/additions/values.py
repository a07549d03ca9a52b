"""A kind of value."""

from tools.additions.addition import Addition

KIND = Addition(
    "a kind of value",
    {
        "_values/counted.py": '''"""`Counted`: a sum, and how many rows are in it."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counted:
    """A sum of rows, with their number.

    Attributes:
        total: The sum.
        count: The number of rows.
    """

    total: Any
    count: Any

    def mean(self) -> Any:
        """Return the mean of the rows."""
        return self.total / self.count
'''
    },
    {
        # For uses that must not open it.
        "_values/kinds.py": (
            (
                "from jaxdist._values.indexed_slices import",
                "from jaxdist._values.counted import Counted\n",
            ),
            ("    GATHERED = (PerReplica, ", "    WHOLE_MEANS = (Counted,)\n"),
        ),
        "_values/__init__.py": (
            (
                "from jaxdist._values.indexed_slices import IndexedSlices",
                "from jaxdist._values.counted import Counted as Counted\n    ",
            ),
        ),
        "__init__.py": (
            (
                "from jaxdist._values import IndexedSlices as",
                "from jaxdist._values import Counted as Counted\n    ",
            ),
        ),
    },
    """
import jax, jax.numpy as jnp, numpy as np, jaxdist
from pathlib import Path
from jaxdist import partition, training
from jaxdist._values import Stop, stops
strategy = jaxdist.MirroredStrategy()
def step(x):
    return jaxdist.Counted(jnp.sum(x), jnp.float32(x.size))
rows = jaxdist.PerReplica([np.arange(n + 1, dtype=np.float32) for n in [3] * 8])
found = strategy.run(step, (rows,))
assert type(found) is jaxdist.Counted, found
whole = strategy.reduce("sum", found, axis=None)
assert float(whole.mean()) == 1.5 and float(whole.total) == 48
assert jax.tree.leaves(whole, is_leaf=stops(Stop.WHOLE_MEANS)) == [whole]
placed = partition.place(strategy, whole, partition.Rules([(".*", partition.Replicate())]))
assert float(strategy.run(lambda c: c.mean(), (placed,))) == 1.5
assert "total" in str(jaxdist.explain(placed, strategy))
checkpoints = training.Checkpoints("saved")
checkpoints.save(1, placed)
back = checkpoints.restore(placed).state
assert float(back.mean()) == 1.5
""",
    "has no attribute 'Counted'",
)
