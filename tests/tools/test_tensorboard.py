"""TensorBoard reads what `fit` has measured."""

import pathlib

import pytest

from tests.tools.programs import run_with

_LINES = """
import json
found = {}
for part, prefix in ("train", ""), ("validation", "val_"):
    events = event_accumulator.EventAccumulator(f"logs/{part}").Reload()
    found[prefix + "loss"] = [e.value for e in events.Scalars("epoch_loss")]
print(json.dumps([found, history.history]))
"""


def test_the_events_have_the_values_of_the_history(tmp_path: pathlib.Path) -> None:
    found, wanted = run_with("tensorboard", 0, _LINES, tmp_path)
    assert sorted(found) == sorted(wanted)
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=1e-6)  # float32 there
