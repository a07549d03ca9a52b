"""What Weights & Biases writes in offline mode is what `fit` has measured, also after a resume."""

import importlib
import json
import pathlib
import struct
from collections.abc import Iterator
from typing import Any

from tests.tools.programs import run_with

_HISTORY = "import json; print(json.dumps(history.history))"
_RESUMED = """
import json
save = {"resume": True}
for epochs in 2, 4:
    with jaxdist.MirroredStrategy().scope():
        model = jaxdist.fit.Model(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    model.compile(
        optax.adam(0.01), optax.softmax_cross_entropy_with_integer_labels
    )
    save = jaxdist.fit.ModelCheckpoint("saved", resume=True)
    history = model.fit(x, y, epochs=epochs, callbacks=[save, log], verbose=0)
def fail(epoch, logs):
    raise RuntimeError
try:
    broken = jaxdist.fit.LambdaCallback(on_epoch_end=fail)
    model.fit(x, y, callbacks=[log, broken], verbose=0)
except RuntimeError:
    print(json.dumps("failed"))
"""


def _read_chunks(file: pathlib.Path) -> Iterator[bytes]:
    """Yield the records of a log in the format of LevelDB, after a header of seven bytes."""
    data, position, held = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        held += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield held
            held = b""


def _read(file: pathlib.Path) -> tuple[dict[int, dict[str, Any]], dict[str, Any], int]:
    """Return what a run has logged by steps, its configuration, and its exit code."""
    records: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    steps: dict[int, dict[str, Any]] = {}
    config: dict[str, Any] = {}
    code = -1
    for chunk in _read_chunks(file):
        record = records.Record()
        record.ParseFromString(chunk)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            values = {name: json.loads(value) for name, value in items.items()}
            step = values.pop("_step", record.history.step.num)
            steps[step] = {k: v for k, v in values.items() if not k.startswith("_")}
        elif kind == "run":
            config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
        elif kind == "exit":
            code = record.exit.exit_code
    return steps, config, code


def _find(folder: pathlib.Path) -> list[pathlib.Path]:
    files = (folder / "wandb").glob("offline-run-*/run-first.wandb")
    return sorted(files, key=lambda file: file.stat().st_mtime_ns)


def test_the_run_has_the_values_of_the_history(tmp_path: pathlib.Path) -> None:
    history = run_with("wandb", 0, _HISTORY, tmp_path)
    (file,) = _find(tmp_path)
    steps, config, code = _read(file)
    assert steps == {i: {name: history[name][i] for name in history} for i in range(3)}
    assert config["learning_rate"] == 0.01
    assert code == 0


def test_a_resumed_run_has_the_same_id_and_the_next_steps_and_a_failed_one_its_code(
    tmp_path: pathlib.Path,
) -> None:
    assert run_with("wandb", 0, _RESUMED, tmp_path) == "failed"
    found = [_read(file) for file in _find(tmp_path)]
    assert [sorted(steps) for steps, _, _ in found] == [[0, 1, 2], [0, 1], [2, 3], [0]]
    assert [code for _, _, code in found] == [0, 0, 0, 1]
