"""Checks that the processes of a job make the same call of `fit`."""

import json
from collections.abc import Mapping
from typing import Any

from jaxdist._processes import exchange, find_odd_ones, get_agreement, tell_blame
from jaxdist._strategies import Strategy
from jaxdist.errors import ProgramMismatchError

_CALLER = "fit.Model.fit"


def check_same_call(strategy: Strategy, own: Mapping[str, Any]) -> None:
    """Compare what decides how often the processes step, evaluate and save.

    Otherwise one process would wait in a step, and another one in a checkpoint or an evaluation,
    until the time for collectives is over.

    Cost:
        One exchange over the store of the job; nothing in one process.

    Raises:
        ProgramMismatchError: A process makes another call.
        OtherProcessError: A process does not call `fit` in time, or has ended.
    """
    if not strategy.layout.is_shared or get_agreement() is None:
        return
    purpose = "the arguments of fit"
    texts = exchange(_CALLER, "fit", json.dumps(dict(own), default=int), None, purpose)
    odd, usual = find_odd_ones(texts)
    if not odd or usual is None:
        return
    there, right = json.loads(texts[odd[0]]), json.loads(texts[usual])
    what = next(name for name in right if right[name] != there[name])
    tell_blame(odd)
    raise ProgramMismatchError(
        f"{_CALLER}: process {odd[0]} makes another call: {what} is {there[what]} there, and "
        f"{right[what]} elsewhere.\n\n"
        "All processes step, evaluate and save together. Of the callbacks that write, jaxdist lets "
        "one process write logs, and all write their parts of a checkpoint.\n\n"
        "Call fit with the same arguments in every process, without a condition on the process.",
        odd,
    )
