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
                "from jaxdist._strategies.mirrored import MirroredStrategy",
                "from jaxdist._strategies.first_devices import FirstDevicesStrategy\n    ",
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

from jaxdist._collectives.algorithms.algorithm import Algorithm, ReplicaGroups


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
                "from jaxdist._collectives.algorithms.one_level import",
                "from jaxdist._collectives.algorithms.gather_all import GatherAll\n",
            ),
            ('    "pscpu/pscpu",\n', '    "gather",\n'),
            ('        "psgpu": OneDevice(),\n', '        "gather": GatherAll(),\n'),
        ),
        # The predicted time, so that `auto` can choose it.
        "cost/_model.py": (
            ('"xring", "rechd", "psgpu", "pscpu")\n', '"gather", '),
            (
                '    if name in ("xla", "xring"):\n',
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

UPDATE = Addition(
    "an optimizer update",
    {
        "_update/largest.py": '''"""`largest_update`, which takes the largest gradient."""

import jax
import optax

from jaxdist import _replica
from jaxdist._update.nested import ReducingUpdate, check_nesting, mark_wrapper
from jaxdist._collectives import ReduceOp


def largest_update(tx: optax.GradientTransformation) -> ReducingUpdate:
    """Return `tx` with the gradient of the largest norm in place of those of all replicas."""
    inner = optax.with_extra_args_support(tx)

    def update(grads, state, params=None, **extra):
        check_nesting("largest_update", ReduceOp.MEAN)
        replica = _replica.current_frame().replica
        every = jax.tree.map(lambda g: replica.all_gather(g[None], axis=0), grads)
        best = jax.numpy.argmax(jax.vmap(optax.global_norm)(every))
        with mark_wrapper("largest_update"):
            return inner.update(jax.tree.map(lambda g: g[best], every), state, params, **extra)

    return ReducingUpdate(inner.init, update)
'''
    },
    {
        "_update/__init__.py": (
            (
                "from jaxdist._update.nested import REDUCED",
                "from jaxdist._update.largest import largest_update\n    ",
            ),
        ),
        "__init__.py": (
            (
                "from jaxdist._update import sharded_update",
                "from jaxdist._update import largest_update as largest_update\n    ",
            ),
        ),
        "_lint/flow/objects.py": (('"compressed_update")', '"largest_update", '),),
    },
    """
import jax, jax.numpy as jnp, optax, jaxdist
strategy = jaxdist.MirroredStrategy()
tx = jaxdist.largest_update(optax.sgd(1.0))
w = jnp.zeros(1)
state = tx.init(w)
def step(w, state, x):
    updates, state = tx.update(jax.grad(lambda w: jnp.sum(w * x))(w), state, w)
    return optax.apply_updates(w, updates)
rows = jaxdist.PerReplica([jnp.full(1, float(n)) for n in range(8)])
assert strategy.run(step, (w, state, rows)).tolist() == [-7.0]
from jaxdist._lint.flow import UPDATES
assert "largest_update" in UPDATES
""",
    "has no attribute 'largest_update'",
)
