"""Summaries of an Estimator: lines of JSON, and events for TensorBoard."""

import dataclasses
import json
import pathlib
import struct
import threading
from typing import Any

import pytest

from jaxdist import estimator as est
from jaxdist.estimator._running import summaries
from tests.estimator.models import Record, batches, model_fn


def _read_events(folder: pathlib.Path) -> dict[str, dict[int, float]]:
    """Return the scalars of all files of events, by name and step."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            # Length, its checksum, the event, its checksum.
            (size,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def _read_lines(folder: pathlib.Path) -> dict[int, dict[str, float]]:
    lines = (folder / "summaries.jsonl").read_text().splitlines()
    return {found["step"]: found for found in map(json.loads, lines)}


def _train(folder: pathlib.Path, **more: Any) -> est.Estimator:
    estimator = est.Estimator(model_fn, folder, est.RunConfig(save_summary_steps=3))
    return estimator.train(batches(5), **more)


def test_training_and_evaluations_are_written_for_tensorboard_with_the_numbers_of_the_lines(
    tmp_path: pathlib.Path,
) -> None:
    pytest.importorskip("tensorboardX")
    estimator = _train(tmp_path)
    estimator.evaluate(batches(7))
    estimator.evaluate(batches(7), name="test")
    trained, lines = _read_events(tmp_path), _read_lines(tmp_path)
    assert list(trained) == ["loss"]
    assert list(trained["loss"]) == list(lines) == [1, 4, 7, 8]
    for step, value in trained["loss"].items():
        assert value == pytest.approx(lines[step]["loss"], rel=1e-6)
    for name in ("eval", "eval_test"):
        found = _read_events(tmp_path / name)
        assert set(found) == {"loss", "error", "first"}
        [(step, values)] = _read_lines(tmp_path / name).items()
        assert {n: v[step] for n, v in found.items()} == pytest.approx(
            {n: values[n] for n in found}, rel=1e-6
        )


def test_a_training_that_goes_on_adds_to_the_events(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboardX")
    _train(tmp_path, steps=3)
    _train(tmp_path, steps=3)
    assert list(_read_events(tmp_path)["loss"]) == [1, 3, 4, 6]


def test_after_an_error_the_events_are_on_disk_and_no_thread_is_left(
    tmp_path: pathlib.Path,
) -> None:
    pytest.importorskip("tensorboardX")
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="the hook failed"):
        _train(tmp_path, hooks=[Record("after_run", 5)])
    assert list(_read_events(tmp_path)["loss"]) == [1, 4]
    left = [t for t in set(threading.enumerate()) - before if "Event" in type(t).__name__]
    assert left == []


def test_without_tensorboardx_there_are_lines_only(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = dataclasses.replace(summaries.TENSORBOARD, module="no_such_module")
    monkeypatch.setattr(summaries, "TENSORBOARD", missing)
    _train(tmp_path).evaluate(batches(7))
    assert not list(tmp_path.rglob("events.out.*"))
    assert list(_read_lines(tmp_path)) == [1, 4, 7, 8]
    assert list(_read_lines(tmp_path / "eval")) == [8]
