"""Integers of 64 bits in a real job; `test_integers_of_64_bits.py` runs it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import jaxdist
from jaxdist import PerReplica, Variable
from jaxdist.errors import ArgumentError

BIG = np.array([2**40 + 5, 1, 2, 3])
FITS = np.array([2**31 - 1, 1, 2, 3])


def _same(x: Any) -> Any:
    return x


def _make(strategy: Any, a: Any) -> Any:
    with strategy.scope():
        return Variable(a).value()


def _assign(strategy: Any, a: Any) -> Any:
    with strategy.scope():
        variable = Variable(np.zeros(4, "int32"))
    variable.assign(a)
    return variable.value()


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "run": lambda s, a: s.run(_same, (a,)),
    "run of PerReplica": lambda s, a: s.run(_same, (PerReplica([a]),)),
    "a constant": lambda s, a: s.run(lambda: jnp.asarray(a) + 0),
    "function": lambda s, a: jaxdist.function(_same)(a),
    "reduce": lambda s, a: s.reduce("mean", PerReplica([a]), axis=None),
    "gather": lambda s, a: s.gather(PerReplica([a]), axis=0),
    "dataset": lambda s, a: next(iter(s.experimental_distribute_dataset([a]))),
    "dataset of a function": lambda s, a: next(
        iter(s.distribute_datasets_from_function(lambda _: [a]))
    ),
    "values from a function": lambda s, a: s.run(
        _same, (s.experimental_distribute_values_from_function(lambda _: a),)
    ),
    "Variable": _make,
    "assign": _assign,
}


def try_all_ways() -> dict[str, str]:
    """For each way, the first line of the error; "nothing" if it takes integers cut off."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    found = {}
    for name, way in WAYS.items():
        way(strategy, FITS)
        try:
            way(strategy, BIG)
            found[name] = "nothing"
        except ArgumentError as error:
            found[name] = str(error).partition("\n")[0]
    return found


def return_from_callbacks() -> dict[str, tuple[list[int], str]]:
    """For each way, what a callback returned that fits, and the error of one that does not."""
    mirrored = jaxdist.MirroredStrategy()
    places: dict[str, Callable[[Any], Any]] = {
        "run": lambda step: mirrored.run(step, (FITS,)),
        "run on 1 device": lambda step: jaxdist.OneDeviceStrategy("cpu:0").run(step, (FITS,)),
        "function": lambda step: jaxdist.function(step)(FITS),
    }
    found = {}
    for call in (jax.pure_callback, io_callback):
        for place, run in places.items():
            returned = [FITS]

            def step(x: Any, call: Any = call, returned: Any = returned) -> Any:
                return call(lambda _: returned[0], jax.ShapeDtypeStruct((4,), "int32"), x)

            fits = np.asarray(jax.tree.leaves(run(step))[0])[:4].tolist()
            returned[0] = BIG
            try:
                jax.block_until_ready(run(step))
                message = "nothing"
            except jax.errors.JaxRuntimeError as error:
                message = str(error)
            found[f"{call.__name__}, {place}"] = (fits, message)
    return found


def give_to_one_process(name: str) -> str:
    """The class of the error of this process, where only process 1 has integers beyond 32 bits."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    is_second = strategy.cluster_resolver.task_id == 1
    try:
        WAYS[name](strategy, BIG if is_second else FITS)
    except Exception as error:
        return type(error).__name__
    return "nothing"
