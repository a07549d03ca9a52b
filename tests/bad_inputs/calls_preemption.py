"""Valid calls of the handler of preemption."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import flax.nnx as nnx

from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.experimental import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from tests.bad_inputs.call import Call


def _model() -> nnx.Module:
    return nnx.Linear(2, 1, rngs=nnx.Rngs(0))


def _arguments() -> dict[str, Any]:
    return {
        "cluster_resolver": SimpleClusterResolver(ClusterSpec({})),
        "checkpoint_or_checkpoint_manager": _model(),
        "checkpoint_dir": tempfile.mkdtemp(),
        "termination_config": TerminationConfig(),
        "read_metadata": lambda path: "NONE",
    }


def _of_handler(method: str) -> Callable[..., Any]:
    def call(*args: Any, **arguments: Any) -> Any:
        handler = PreemptionCheckpointHandler(None, _model(), pathlib.Path(tempfile.mkdtemp()))
        try:
            return getattr(handler, method)(*args, **arguments)
        finally:
            handler.close()

    return call


def _of_watcher(method: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        watcher = PreemptionWatcher()
        try:
            return getattr(watcher, method)(**arguments)
        finally:
            watcher.close()

    return call


_PLACE = "jaxdist.experimental"
_HANDLER, _WATCHER = f"{_PLACE}.PreemptionCheckpointHandler", f"{_PLACE}.PreemptionWatcher"
CALLS: dict[str, Call] = {
    _HANDLER: Call(
        lambda: PreemptionCheckpointHandler, _arguments, use=lambda handler: handler.close()
    ),
    f"{_HANDLER}.run": Call(
        lambda: _of_handler("run"), lambda: {"distributed_train_function": lambda: 1}
    ),
    f"{_HANDLER}.save_checkpoint_if_preempted": Call(
        lambda: _of_handler("save_checkpoint_if_preempted"), lambda: {"notes": {}}
    ),
    f"{_HANDLER}.watch_preemption_scope": Call(lambda: _of_handler("watch_preemption_scope")),
    f"{_HANDLER}.close": Call(lambda: _of_handler("close")),
    _WATCHER: Call(lambda: PreemptionWatcher, use=lambda watcher: watcher.close()),
    f"{_WATCHER}.block_until_worker_exit": Call(lambda: _of_watcher("block_until_worker_exit")),
    f"{_WATCHER}.close": Call(lambda: _of_watcher("close")),
    f"{_PLACE}.TerminationConfig": Call(
        lambda: TerminationConfig,
        lambda: {
            "termination_watcher_fn": lambda: False,
            "exit_fn": lambda: None,
            "grace_period": 1.0,
            "save_fn": lambda: None,
        },
    ),
}
