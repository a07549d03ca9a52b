"""Every report and command on screens of 60 to 120 columns, and in a pipe."""

import collections
import functools
import io
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import jaxdist
from jaxdist import cost, fit, partition, tpu
from jaxdist._explain.profile import Operation, StepTimes
from jaxdist._reports import (
    Candidate,
    DividedWork,
    Memory,
    Places,
    Report,
    SlicePlan,
    Sweep,
    Times,
    Traffic,
    print_line,
)
from jaxdist.cli import _plan, main
from jaxdist.cli._measure import Measurements
from jaxdist.fit._loop.progress import Progress, print_result

WIDTHS = (60, 80, 100, 120)
_UNIT = r"(?:[KMGT]i?B|B|bytes?|[mu]?s|[kMGTP]?FLOP(?:/s)?|[kMGTP]?B/s)(?![\w/])"
# Numbers with their units, shapes, and numbers of devices.
_WHOLE = re.compile(rf"[\d.,]+ {_UNIT}|[\[(][\d:][\d:, ]*[\])]|\d[\d,]* x [\d,]+")


def explain_strategy() -> Report:
    strategy = jaxdist.MirroredStrategy()
    for rows in (8, 16, 24):
        strategy.run(_double, (jaxdist.PerReplica([jnp.ones(rows)] * 8),))
    return jaxdist.explain(strategy)


def _double(x: Any) -> Any:
    return x * 2


def explain_slice() -> Report:
    resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x4")
    return jaxdist.explain(jaxdist.TPUStrategy(resolver))


def explain_arrays() -> Report:
    strategy = jaxdist.MirroredStrategy()
    model = nnx.Linear(512, 1024, rngs=nnx.Rngs(0))
    partition.place(strategy, model, partition.fsdp(min_bytes=1 << 16))
    images = np.ones((1024, 512), np.float32)
    return jaxdist.explain({"model": model, "rows": {"images": images}}, strategy)


def explain_one_array() -> Report:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    spec = jax.sharding.PartitionSpec("data", None, "model")
    x = jax.device_put(jnp.ones((8, 3, 4)), jax.sharding.NamedSharding(mesh, spec))
    return jaxdist.explain(x)


def explain_program() -> Report:
    strategy = jaxdist.MirroredStrategy()

    def step(params: Any, x: Any) -> Any:
        context = jaxdist.get_replica_context()
        return context.all_reduce("sum", x @ params["w"]), jax.lax.all_gather(x[:2], "replica")

    x = jaxdist.PerReplica([jnp.ones((4, 64))] * 8)
    return jaxdist.explain(strategy.lower(step, ({"w": jnp.ones((64, 64))}, x)))


def explain_profile() -> Report:
    parts = {"matrix products": 1.58e-4, "collectives": 2.86e-3, "idle": 1.5e-5}
    operations = (
        Operation("dot_general.12", "matrix products", 1.2e-4, 3.0),
        Operation("all-reduce-start.3", "collectives", 2.8e-3, 1.0),
    )
    path = pathlib.Path("profile/plugins/perfetto_trace.json.gz")
    return StepTimes("train_step", 5, 8, 3.033e-3, parts, 1.25e-4, operations, path)


def make_plan() -> SlicePlan:
    topology = tpu.slice_of("v5p:4x4x4").topology
    assignment = tpu.experimental.DeviceAssignment.build(topology, num_replicas=64)
    sizes = (3 << 30, 6 << 30, 0, 1 << 20, 4096, 1 << 20, 5 << 20, 1 << 16, 9 << 30, 95 << 30)
    memory = Memory(*sizes, fits=True)
    traffic = (
        Traffic("ICI", "all-reduce", 3, 3 << 30, 5.9e9, 64, 1, 1.25e-2, axes=("model",)),
        Traffic("DCN", "reduce-scatter", 12, 3 << 20, 5.9e6, 16, 1024, 1.25e-4, axes=("data",)),
    )
    return SlicePlan(
        "train_step",
        "v5p:4x4x4",
        cost.CHIPS["v5p"],
        2,
        1,
        Places.from_assignment(assignment, 1),
        "fsdp_in_slice_tensor_parallel",
        1024,
        memory,
        123_456_789_012,
        9 << 30,
        traffic,
        Times(1.5e-3, 2.5e-3, 1.2e-2, 0.0, 1.25e-2),
        advice=("jaxdist.sharded_update(tx) keeps 6 GiB less on each of 64 devices.",),
        work=(
            DividedWork(
                "jaxdist.nn.pipeline_loss",
                "train.py:12",
                (("schedule", "1f1b, 4 stages x 2 chunks"), ("ticks", "3 F, 8 FB, 3 B")),
            ),
        ),
    )


def make_sweep() -> Sweep:
    plan = make_plan()
    return Sweep(
        "topics_lm",
        "v5p:4x4x4",
        131_072,
        (
            Candidate("replicated", 128, 1, plan),
            Candidate("fsdp_in_slice_tensor_parallel", 64, 2, plan),
            Candidate("tensor_parallel", 8, 16, None, "12 heads are not divided by 16 devices."),
        ),
    )


def summarize() -> Report:
    with jaxdist.MirroredStrategy().scope():
        model = fit.Model(nnx.Linear(512, 1024, rngs=nnx.Rngs(0)))
    model.compile(optax.adam(1e-3), optax.squared_error)
    return model.summary()


_REPORTS: tuple[Callable[[], Report], ...] = (
    explain_strategy,
    explain_slice,
    explain_arrays,
    explain_one_array,
    explain_program,
    explain_profile,
    make_plan,
    make_sweep,
    summarize,
)


@functools.cache
def _made(make: Callable[[], Report]) -> Report:
    return make()


def check_screen(shown: str, piped: str, width: int) -> None:
    """Check that lines fit, and that all numbers of the pipe are on the screen in one piece."""
    for line in shown.splitlines():
        # One name or path that is longer than the screen cannot be broken.
        assert len(line) <= width or len(line.split()) == 1, line
    numbers, whole = (
        [collections.Counter(find(text)) for text in (piped, shown)]
        for find in (_find_numbers, _WHOLE.findall)
    )
    assert not numbers[0] - numbers[1]
    assert not whole[0] - whole[1]


def _find_numbers(text: str) -> list[str]:
    return [word.strip(".,:;()[]") for word in text.split() if re.search(r"\d", word)]


@pytest.mark.parametrize("make", _REPORTS, ids=lambda make: make.__name__)
def test_a_report_fits_each_screen_with_whole_numbers(
    make: Callable[[], Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = _made(make)
    monkeypatch.delenv("COLUMNS", raising=False)
    piped = report.text()
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        check_screen(str(report), piped, width)
        out = io.StringIO()
        Console(file=out, width=width).print(report)
        assert out.getvalue() == f"{report}\n"


_PROGRAM = """import jax
step = jax.pmap(f)
"""
_CLUSTER = {
    "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:1"]},
    "task": {"type": "worker", "index": 1},
}
_COMMANDS = {
    "info": ["info"],
    "info --all": ["info", "--all"],
    "chips": ["chips"],
    "resolve": ["resolve"],
    "lint": ["lint", "train.py"],
    "plan": ["plan", "no.toml", "--topology", "v5p:4x4x4"],
    "plan --sweep": ["plan", "no.toml", "--topology", "v5p:4x4x4", "--sweep"],
    "bench": ["bench", "collectives", "--devices", "2", "--sizes", "64", "8MiB", "--rounds", "1"],
}


@pytest.fixture
def _prepared(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for `lint`, a job for `resolve`, times for `bench`, and plans."""
    (tmp_path / "train.py").write_text(_PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_CONFIG", json.dumps(_CLUSTER))
    jax.devices()  # `--devices 2` would leave two of them to all tests after it.
    sizes = ((n, size) for n in (1, 16) for size in (64, 8 << 20))
    samples = tuple(cost.Sample(n, size, 1.23456e-3 * n) for n, size in sizes)
    measured = Measurements(samples, 3.2e9, 1.4)
    monkeypatch.setattr("jaxdist.cli._bench.measure", lambda *_: measured)
    monkeypatch.setattr("jaxdist.jobs.load_job", lambda *_: None)
    made = lambda _job, _topology, given: (  # noqa: E731
        make_sweep() if given.sweep else make_plan()
    )
    monkeypatch.setattr("jaxdist.cli._plan._make_plan", made)


@pytest.mark.usefixtures("_prepared")
@pytest.mark.parametrize("command", _COMMANDS)
def test_a_command_fits_each_screen_with_whole_numbers(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> str:
        if command == "bench":
            # A job of several processes is measured otherwise.
            monkeypatch.delenv("TF_CONFIG")
        code = main(_COMMANDS[command])
        monkeypatch.setenv("TF_CONFIG", json.dumps(_CLUSTER))
        assert code in (0, 1, 2)
        captured = capsys.readouterr()
        assert not captured.err
        return captured.out

    monkeypatch.delenv("COLUMNS", raising=False)
    piped = run()
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        check_screen(run(), piped, width)


@pytest.mark.usefixtures("_prepared")
@pytest.mark.parametrize(
    ("command", "lines"),
    [
        # Each finding has four lines, and a last one counts them.
        ("lint", 5),
        # A title, columns, five rows, and the error of two equal addresses.
        ("resolve", 8),
    ],
)
def test_nothing_wraps_in_a_pipe(
    command: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    main(_COMMANDS[command])
    assert len(capsys.readouterr().out.splitlines()) == lines


@pytest.mark.usefixtures("_prepared")
def test_a_plan_has_replicas_in_colours_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(_COMMANDS["plan"]) == 0
    plain = capsys.readouterr().out
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLORTERM", "truecolor")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(_COMMANDS["plan"]) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[38;2;" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


@pytest.mark.parametrize("width", WIDTHS)
def test_progress_of_a_plan_keeps_the_time_and_shortens_the_words(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("COLUMNS", str(width)), ("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    layout = "7 of 7, remat parameters, fsdp_tensor_parallel, 1 x 4: compiling for v5e:2x2"
    with _plan._show_progress() as report:
        report(f"{layout}; minutes where arrays are large")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [line for line in re.split(r"[\r\n]+", shown) if "7 of 7" in line]
    assert lines
    for line in lines:
        assert re.search(r" \d:\d\d:\d\d\b", line)
        assert len(line.rstrip()) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_the_result_of_an_evaluation_has_each_value_on_one_line(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr("jaxdist.fit._loop.progress.make_console", lambda: console)
    logs = {f"metric_{'x' * n}": 0.25 * n for n in range(1, 12)}
    print_result(logs)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for name, value in logs.items():
        assert [f"{name} {value:.4g}" in line for line in lines].count(True) >= 1
    console.width = 1000
    out.truncate(0)
    print_result(logs)
    assert out.getvalue().count("\n") == 1


def test_sentences_of_a_training_break_between_words_on_a_terminal_only() -> None:
    text = (
        "finished before, at step 600: nothing was trained or written. It uses 12 GiB (runs/a-b)."
    )
    for width in (40, 60, 80):
        shown = {}
        for is_terminal in (True, False):
            out = io.StringIO()
            print_line(Console(file=out, width=width, force_terminal=is_terminal), text)
            shown[is_terminal] = out.getvalue()
        assert shown[False] == f"{text}\n"
        lines = shown[True].splitlines()
        assert len(lines) > 1
        assert max(map(len, lines)) <= width
        assert " ".join(lines) == text
        assert "12 GiB" in shown[True]


@pytest.mark.parametrize("verbose", [1, 2])
def test_progress_of_fit_keeps_its_numbers(verbose: int) -> None:
    logs = {"loss": 7.0912, "root_mean_squared_error": 2.6631, "val_loss": 7.0351}
    for width in (*WIDTHS, None):
        out = io.StringIO()
        console = Console(file=out, width=width, force_terminal=width is not None)
        progress = Progress(verbose, 10, 5)
        progress._console = console
        with progress:
            progress.begin(9)
            progress.end(logs)
            progress.say(
                "a sentence that is wider than a screen of 60 columns, and its number 1 GiB"
            )
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
        for words in ("epoch 10/10", "loss 7.091", "root_mean_squared_error 2.663", "1 GiB"):
            assert words in shown
        if width is None:
            assert len(shown.splitlines()) == 2 or verbose == 1
        else:
            assert max(map(len, shown.splitlines())) <= width
