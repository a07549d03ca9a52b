"""Compiled programs in files: they run without compiling, and refuse what they are not for."""

import contextlib
import hashlib
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica, RunOptions, _compat
from jaxdist._planning import make_target
from jaxdist._program.compile.saving import saved
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    SavedProgramError,
    UnsupportedError,
)
from jaxdist.jobs.topics_lm._attention import attend
from tests.processes.job import results_of_job

pytestmark = pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")


_LEVEL = "jax_optimization_level"


def _two() -> Any:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def _rows(count: int = 3) -> PerReplica:
    return PerReplica(list(np.arange(2 * count, dtype=np.float32).reshape(2, count)))


def _step(w: Any, x: Any) -> Any:
    context = jaxdist.get_replica_context()
    grad = jax.grad(lambda w: jnp.sum((w * x) ** 2))(w)
    return w - 0.1 * context.all_reduce("mean", grad), x + 1


def _nnx_step(model: Any, optimizer: Any, x: Any) -> Any:
    def loss(model: Any) -> Any:
        return jnp.mean(model(x) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    grads = jaxdist.get_replica_context().all_reduce("mean", grads)
    optimizer.update(model, grads)
    return jaxdist.get_replica_context().all_reduce("mean", value)


@contextlib.contextmanager
def _count_compilations() -> Iterator[list[None]]:
    """Count what jaxdist compiles in the block."""
    compiled: list[None] = []
    compile_it = jax.stages.Lowered.compile

    def compile_and_count(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append(None)
        return compile_it(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile_and_count)
        yield compiled


def _save(folder: Path, fn: Any = _step, args: Any = None, **options: Any) -> Path:
    path = folder / "step.program"
    args = (np.ones(3, np.float32), _rows()) if args is None else args
    given = RunOptions(**options)
    _two().lower(fn, args, options=given).compile().save(path)
    return path


def test_a_saved_program_gives_the_numbers_without_a_compilation(tmp_path: Path) -> None:
    options = RunOptions(saved_program=_save(tmp_path))
    wanted = _two().run(_step, (np.ones(3, np.float32), _rows()))
    strategy, w, x = _two(), np.ones(3, np.float32), _rows()
    with _count_compilations() as count:
        found = [strategy.run(_step, (w, x), options=options) for _ in range(3)]
    assert count == []
    for new, rows in found:
        np.testing.assert_array_equal(new, wanted[0])
        np.testing.assert_array_equal(rows.array, wanted[1].array)


def test_a_donated_state_and_a_sharded_one_are_updated_as_by_the_compiled_step(
    tmp_path: Path,
) -> None:
    tx = jaxdist.sharded_update(optax.adam(0.1), min_bytes=0)

    def step(w: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(jax.grad(lambda w: jnp.sum(w * x))(w), state, w)
        return optax.apply_updates(w, updates), state

    def train(options: RunOptions) -> list[np.ndarray]:
        strategy, w = _two(), jnp.ones(3)
        with strategy.scope():
            state = tx.init(w)
        found = []
        for _ in range(3):
            w, state = strategy.run(step, (w, state, _rows()), options=options)
            found.append(np.asarray(w))
        return found

    with _two().scope():
        state = tx.init(jnp.ones(3))
    donating = RunOptions(donate_argnums=(0, 1))
    path = _save(tmp_path, step, (jnp.ones(3), state, _rows()), donate_argnums=(0, 1))
    loaded = train(donating._replace(saved_program=path))
    np.testing.assert_array_equal(loaded, train(donating))


def test_the_state_of_nnx_objects_is_updated(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    x = PerReplica([np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)])
    path = _save(tmp_path, _nnx_step, (*make(), x))
    losses = []
    for options in (None, RunOptions(saved_program=path)):
        model, optimizer = make()
        strategy = _two()
        losses.append(
            [
                float(strategy.run(_nnx_step, (model, optimizer, x), options=options))
                for _ in range(3)
            ]
        )
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]


def test_other_inputs_are_compiled_and_the_first_time_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = RunOptions(saved_program=_save(tmp_path))
    strategy = _two()
    with caplog.at_level(logging.INFO, "jaxdist"):
        for count in (3, 2):
            w = np.ones(count, np.float32)
            new, _ = strategy.run(_step, (w, _rows(count)), options=options)
            wanted, _ = _two().run(_step, (w, _rows(count)))
            np.testing.assert_array_equal(new, wanted)
        _two().run(_step, (np.ones(2, np.float32), _rows(2)), options=options)
    told = [r for r in caplog.records if "for other inputs" in r.message]
    assert [r.levelno for r in told] == [logging.INFO, logging.WARNING]
    assert "args[0] is mirrored float32[2], and mirrored float32[3] in the file" in told[0].message


def test_a_program_that_the_compilation_cache_has_is_saved_with_its_machine_code(
    tmp_path: Path,
) -> None:
    jaxdist.config.compilation_cache(tmp_path / "cache")
    for _ in range(2):
        path = _save(tmp_path)
    new, _ = _two().run(
        _step, (np.ones(3, np.float32), _rows()), options=RunOptions(saved_program=path)
    )
    wanted, _ = _two().run(_step, (np.ones(3, np.float32), _rows()))
    np.testing.assert_array_equal(new, wanted)


def _other_step(w: Any, x: Any) -> Any:
    return w * 2, x


_Change = Callable[[dict[str, Any]], object]
_HEADERS: dict[str, tuple[_Change, list[str]]] = {
    "version": (
        lambda h: h["needs"].update(jax="0.1.2"),
        ["jax: 0.1.2 in the file", f"{jax.__version__} here"],
    ),
    "package": (
        lambda h: h["needs"].update(libtpu="1.0"),
        ["libtpu: 1.0 in the file, nothing here"],
    ),
    "platform": (
        lambda h: h["needs"].update(platform="tpu"),
        ["platform: tpu in the file, cpu here"],
    ),
    "processor": (lambda h: h["needs"].update(processor="x"), ["processor: x in the file"]),
    "flags": (lambda h: h["needs"].update(flags="--xla_a"), ["flags: --xla_a in the file"]),
    "count": (lambda h: h["devices"].pop(), ["devices: 1 in the file, 2 here"]),
    "order": (lambda h: h["devices"].reverse(), ["device 0 of the mesh: 1 in the file, 0 here"]),
}


@pytest.fixture
def no_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(saved.serialize_executable, "deserialize_and_load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)


def _read_header(path: Path) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(path.read_bytes().split(b"\n", 2)[1])
    return header


def _change_header(path: Path, change: _Change) -> None:
    _, line, payload = path.read_bytes().split(b"\n", 2)
    header = json.loads(line)
    change(header)
    rest = json.dumps(header).encode() + b"\n" + payload
    checksum = hashlib.sha256(rest).hexdigest().encode()
    path.write_bytes(b"jaxdist program 1 " + checksum + b"\n" + rest)


def _load(path: Path, fn: Any = _step, **options: Any) -> Any:
    given = RunOptions(saved_program=path, **options)
    return _two().run(fn, (np.ones(3, np.float32), _rows()), options=given)


@pytest.mark.usefixtures("no_unpickling")
@pytest.mark.parametrize("what", _HEADERS)
def test_a_file_for_something_else_is_refused_by_name_before_anything_is_unpickled(
    tmp_path: Path, what: str
) -> None:
    change, words = _HEADERS[what]
    path = _save(tmp_path)
    _change_header(path, change)
    with pytest.raises(SavedProgramError) as error:
        _load(path)
    for word in (*words, str(path), "Save it again"):
        assert word in str(error.value)


@pytest.mark.usefixtures("no_unpickling")
def test_another_step_options_or_devices_are_refused(tmp_path: Path) -> None:
    path = _save(tmp_path)
    with pytest.raises(SavedProgramError, match=r"other operations(.|\n)*Save it again"):
        _load(path, _other_step)
    with pytest.raises(SavedProgramError, match="xla_cpu_enable_fast_math=true"):
        _load(path, compiler_options={"xla_cpu_enable_fast_math": True})
    with pytest.raises(SavedProgramError, match="other operations"):
        _load(path, donate_argnums=(0,))
    one = jaxdist.MirroredStrategy(["cpu:0"])
    with pytest.raises(SavedProgramError, match="devices: 2 in the file, 1 here"):
        one.run(_step, (np.ones(3, np.float32),) * 2, options=RunOptions(saved_program=path))


@pytest.mark.usefixtures("no_unpickling")
@pytest.mark.parametrize("part", [0, 1, 40, -1, -1000])
def test_a_cut_file_is_refused_before_anything_is_unpickled(tmp_path: Path, part: int) -> None:
    path = _save(tmp_path)
    path.write_bytes(path.read_bytes()[:part])
    with pytest.raises(SavedProgramError, match=r"not a saved program|is damaged"):
        _load(path)


@pytest.mark.usefixtures("no_unpickling")
def test_a_changed_byte_a_missing_file_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    path = _save(tmp_path)
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(SavedProgramError, match="is damaged"):
        _load(path)
    with pytest.raises(SavedProgramError, match="cannot be read"):
        _load(tmp_path / "missing")
    other = tmp_path / "other"
    for text in ("jaxdist program 0 ab\n", "", "[1]\n"):
        other.write_text(text)
        with pytest.raises(SavedProgramError, match="not a saved program"):
            _load(other)
    for change in (lambda h: h.pop("needs"), lambda h: h.update(needs=None)):
        path = _save(tmp_path)
        _change_header(path, change)
        with pytest.raises(SavedProgramError, match="is damaged"):
            _load(path)
    for given in (3, b"step", ""):
        with pytest.raises((ArgumentTypeError, ArgumentError), match="saved_program"):
            _load(given)  # type: ignore[arg-type]


def test_what_jax_cannot_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _save(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such thing\nmore")

    monkeypatch.setattr(saved.serialize_executable, "deserialize_and_load", fail)
    with pytest.raises(SavedProgramError, match=r"cpu: UNIMPLEMENTED: no such thing(.|\n)*out,"):
        _load(path)


def test_what_cannot_be_saved_says_why_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printing(w: Any, x: Any) -> Any:
        jax.debug.print("w {}", w)
        return w, x

    with pytest.raises(UnsupportedError, match=r"jax\.debug\.print(.|\n)*under a Python condition"):
        _save(tmp_path, printing)
    with pytest.raises(ArgumentError, match="is not a directory"):
        _save(tmp_path / "no folder")
    with pytest.raises(ArgumentError, match="is a directory"):
        _two().lower(_other_step, (1.0, 2.0)).compile().save(tmp_path)

    def refuse(compiled: Any) -> None:
        raise ValueError("Compilation does not support serialization")

    monkeypatch.setattr(saved.serialize_executable, "serialize", refuse)
    with pytest.raises(UnsupportedError, match=r"does not support serialization(.|\n)*cache"):
        _save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _save(tmp_path)
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(SavedProgramError, match="disk full"):
        _save(tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_level_of_optimization_is_a_part_of_what_a_file_needs(tmp_path: Path) -> None:
    path = _save(tmp_path)
    before = getattr(jax.config, _LEVEL)
    jax.config.update(_LEVEL, "O0")
    try:
        with pytest.raises(SavedProgramError, match=f"flags:(.|\n)*{_LEVEL}"):
            _load(path)
    finally:
        jax.config.update(_LEVEL, before)


def test_another_static_argument_is_compiled_once_the_step_has_its_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def step(x: Any, doubles: bool) -> Any:
        return 2 * x if doubles else x

    path = _save(tmp_path, step, (1.0, True))
    strategy, options = _two(), RunOptions(saved_program=path)
    with caplog.at_level(logging.INFO, "jaxdist"):
        found = [float(strategy.run(step, (3.0, flag), options=options)) for flag in (True, False)]
    assert found == [6.0, 3.0]
    assert "a static argument or an attribute of a module differs" in caplog.text
    with pytest.raises(SavedProgramError, match="other operations"):
        _two().run(step, (3.0, False), options=options)


def test_a_check_of_gradients_compiles(tmp_path: Path) -> None:
    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: jnp.mean((w * x) ** 2))(w)
        return w - 0.1 * jaxdist.get_replica_context().all_reduce("mean", grad)

    args = (np.float32(1), _rows())
    options = RunOptions(saved_program=_save(tmp_path, step, args))
    _two().check_gradients(step, args, options=options)


def test_a_name_that_is_too_long_is_an_error_of_ours(tmp_path: Path) -> None:
    for length in (254, 300):
        program = _two().lower(_other_step, (1.0, 2.0)).compile()
        with contextlib.suppress(SavedProgramError, ArgumentError):
            program.save(tmp_path / ("a" * length))
            assert length == 254


def test_kernels_of_tpus_are_described_without_the_files_of_this_machine() -> None:
    pytest.importorskip("libtpu")
    target = make_target("v5e:1x1", 1)
    query = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)

    def step(q: Any) -> Any:
        return attend(q, q, q, how="splash", chunk=0)

    text = _compat.describe_lowered(target.strategy.lower(step, (query,)).lowered())
    assert "tpu_custom_call" in text
    assert "memref" in text
    assert ".py" not in text


def test_checks_for_nan_compile_their_own_program(tmp_path: Path) -> None:
    path = _save(tmp_path, donate_argnums=(0,))
    with jax.debug_nans(True):
        new, _ = _load(path, donate_argnums=(0,))
    np.testing.assert_array_equal(new, _load(path, donate_argnums=(0,))[0])


def _save_or_load(folder: str, saver: int | None) -> Any:
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    index = strategy.layout.process.index
    path = Path(folder) / "step.program"
    x = PerReplica([np.full(3, 1 + index, np.float32)])
    args = (np.ones(3, np.float32), x)
    if saver == index:
        strategy.lower(_step, args).compile().save(path)
    with _count_compilations() as count:
        options = RunOptions(saved_program=path) if saver is None else None
        new, _ = strategy.run(_step, args, options=options)
    return np.asarray(new).tolist(), len(count)


@pytest.mark.parametrize("saver", [0, 1])
def test_all_processes_load_what_one_of_them_has_saved(tmp_path: Path, saver: int) -> None:
    wanted = results_of_job(_save_or_load, 2, args=(str(tmp_path), saver), timeout=120)
    found = results_of_job(_save_or_load, 2, args=(str(tmp_path), None), timeout=120)
    assert [values for values, _ in found] == [values for values, _ in wanted]
    assert [count for _, count in wanted] == [1, 1]
    assert [count for _, count in found] == [0, 0]


def test_a_plan_of_a_step_that_cannot_be_saved_is_refused_before_it_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libtpu")
    monkeypatch.delattr(jax.stages.Lowered, "compile")

    def printing(x: Any) -> Any:
        jax.debug.print("x {}", x)
        return x

    program = _two().lower(printing, (1.0,))
    with pytest.raises(UnsupportedError, match=r"cannot be saved: it calls jax\.debug\.print"):
        program.compile_for("v5e:1x2", quick=True, save=tmp_path / "step.program")


def test_a_plan_saves_the_program_of_its_slice(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    path = tmp_path / "step.program"
    program = _two().lower(
        lambda w, x: x @ w, (jnp.ones((8, 8)), PerReplica(list(jnp.ones((2, 4, 8)))))
    )
    plan = program.compile_for("v5e:1x2", quick=True, save=path)
    assert f"Saved to {path}: run the step with RunOptions" in str(plan)
    header = _read_header(path)
    assert header["needs"]["platform"] == "tpu"
    assert "libtpu" in header["needs"]
    assert header["devices"] == ["0 at 0,0,0, core 0", "1 at 0,1,0, core 0"]
    with pytest.raises(SavedProgramError, match="platform: tpu in the file, cpu here"):
        _load(path)
    with pytest.raises(ArgumentError, match="is not a directory"):
        program.compile_for("v5e:1x2", quick=True, save=tmp_path / "no" / "file")
