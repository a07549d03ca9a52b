"""A strategy, an all-reduce, and a primitive that runs a program."""

from tools.additions.addition import Addition

STRATEGY = Addition(
    "a strategy",
    {
        "_strategies/first_devices.py": '''"""`FirstDevicesStrategy`: the first devices."""

from typing import final

import jax

from jaxdist import _mesh
from jaxdist._strategies.base import Strategy


@final
class FirstDevicesStrategy(Strategy):
    """One replica on each of the first devices."""

    def __init__(self, count: int) -> None:
        self._set_up(_mesh.build(jax.devices()[:count]))
'''
    },
    {
        "_strategies/__init__.py": (
            (
                "from jaxdist._strategies.mirrored import",
                "from jaxdist._strategies.first_devices import FirstDevicesStrategy\n",
            ),
            ('    "GradientReport",\n', '    "FirstDevicesStrategy",\n'),
        )
    },
    """
import jax.numpy as jnp
import jaxdist
strategy = jaxdist.FirstDevicesStrategy(3)
rows = strategy.run(lambda: jaxdist.get_replica_context().replica_id_in_sync_group + 1)
assert int(strategy.reduce("sum", rows, axis=None)) == 1 + 2 + 3
with strategy.scope():
    variable = jaxdist.Variable(jnp.zeros(2), aggregation=jaxdist.VariableAggregation.MEAN)
strategy.run(lambda: variable.assign_add(jnp.ones(2)))
assert variable.numpy().tolist() == [1, 1]
""",
    "has no attribute 'FirstDevicesStrategy'",
)

ALL_REDUCE = Addition(
    "an all-reduce",
    {
        "_collectives/algorithms/gather_all.py": '''"""The all-reduce by one all-gather."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.algorithm import Algorithm
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups


@dataclasses.dataclass(frozen=True)
class GatherAll(Algorithm):
    """Every replica gathers all vectors, and sums them."""

    @property
    def name(self) -> str:
        """The name in specs."""
        return "gather"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum of the gathered vectors."""
        rows = jax.lax.all_gather(vector, level.name, axis_index_groups=level.index_groups)
        return jnp.sum(rows, axis=0, dtype=vector.dtype)
'''
    },
    {
        "_collectives/algorithms/by_name.py": (
            (
                "from jaxdist._collectives.algorithms.halving_doubling import",
                "from jaxdist._collectives.algorithms.gather_all import GatherAll\n",
            ),
            ('    "pscpu/pscpu",\n', '    "gather",\n'),
            ('        "psgpu": OneDevice(),\n', '        "gather": GatherAll(),\n'),
        ),
        # The predicted time, so that `auto` can choose it.
        "cost/_model.py": (
            ('"xring", "rechd", "psgpu", "pscpu")\n', '"gather", '),
            (
                '    if name == "xring":\n',
                """    if name == "gather":
        return _Traffic(1, (n - 1) * size, n * (n - 1) * size)
""",
            ),
        ),
    },
    """
import jax
import jax.numpy as jnp
import numpy as np
import jaxdist
from jaxdist import cost
workers = ("/job:worker/task:0", "/job:worker/task:1")
ops = jaxdist.contrib.MultiWorkerAllReduce(workers, 4, all_reduce_spec="gather")
strategy = jaxdist.MirroredStrategy(cross_device_ops=ops)
rows = jaxdist.PerReplica([np.full(3, r, np.float32) for r in range(8)])
assert strategy.reduce("sum", rows, axis=None).tolist() == [28, 28, 28]
links = cost.links_of(strategy.layout)
assert "gather" in dict(cost.cheapest(8, 4096, links, algorithms=["xla", "gather"]))
""",
    "the algorithm 'gather', which does not exist",
)

PRIMITIVE = Addition(
    "a primitive that runs a program",
    {},
    {
        "_program/jaxprs/interpreter.py": (
            ('    "custom_linear_solve": "linear_solve",\n', '    "twice": "twice",\n'),
            (
                "\n\ndef rule_for(",
                '''
    def twice(self, eqn: Any, inputs: list[V]) -> list[V]:
        """Return the results of a `twice`."""
        return self.operation(eqn, inputs)
''',
            ),
        ),
        "_program/jaxprs/forward_analysis.py": (
            (
                "    def linear_solve(self, eqn: Any, inputs: list[L]) -> list[L]:\n",
                '''    def twice(self, eqn: Any, inputs: list[L]) -> list[L]:
        """Analyse the program twice."""
        return self.run(eqn.params["jaxpr"], self.run(eqn.params["jaxpr"], inputs))

''',
            ),
        ),
    },
    """
import jax
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
import jaxdist
twice_p = Primitive("twice")
twice_p.multiple_results = True
def run_twice(*args, jaxpr):
    once = jaxpr_as_fun(jaxpr)
    return once(*once(*args))
twice_p.def_impl(run_twice)
twice_p.def_abstract_eval(lambda *args, jaxpr: [v.aval for v in jaxpr.jaxpr.outvars])
mlir.register_lowering(twice_p, mlir.lower_fun(run_twice, multiple_results=True))
def step(x):
    return twice_p.bind(x, jaxpr=jax.make_jaxpr(lambda a: (a * 3,))(x))[0]
strategy = jaxdist.MirroredStrategy()
equal = strategy.run(step, (np.float32(2),))
# Without the rule, nothing is known of the result, so every replica returns its own.
assert isinstance(equal, jax.Array), "not known to be equal"
assert float(equal) == 18
rows = jaxdist.PerReplica([np.float32(r) for r in range(8)])
differs = strategy.run(step, (rows,))
assert [float(v) for v in differs.values] == [9.0 * r for r in range(8)]
""",
    "not known to be equal",
)
