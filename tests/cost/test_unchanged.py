"""Predictions for TPUs and CPUs are those of before GPUs had size curves, to the last bit."""

import json
import pathlib
from typing import Any

import pytest

from jaxdist import cost
from jaxdist.hlo import KINDS

# Written by commit 7f743f30, for 8 CPU devices: collective_seconds of 3 operands in 2 groups, and
# seconds of 2 operands.
RECORDED: dict[str, Any] = json.loads(
    pathlib.Path(__file__).with_name("predictions_of_tpu_and_cpu.json").read_text()
)
ACROSS = {"tpu-v5e-ici": "tpu-v5e-dcn", "tpu-7x-ici": "tpu-7x-dcn"}


def _predict(name: str, what: str, n: int, local: int, size: int) -> float:
    link = cost.for_devices(cost.TABLE[name], 8)
    if what in KINDS:
        return cost.collective_seconds(what, n, size, link, 3, 2)
    across = cost.for_devices(cost.TABLE[ACROSS.get(name, name)], 8)
    return cost.seconds(what, n, size, cost.Links(link, across), local, 2)


@pytest.mark.parametrize("name", sorted({row[0] for row in RECORDED["rows"]}))
def test_predictions_without_gpus_are_unchanged(name: str) -> None:
    rows = [row for row in RECORDED["rows"] if row[0] == name]
    for _, what, n, local, recorded in rows:
        found = [_predict(name, what, n, local, size) for size in RECORDED["sizes"]]
        assert found == recorded, (what, n, local)
    assert len(rows) >= len(KINDS)
