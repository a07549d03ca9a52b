"""What `fit` and reports show in a notebook: one output each, and no widgets."""

import html
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from jaxdist._reports import LiveOutput
from jaxdist._reports import notebook as of_notebooks
from tools.notebooks import make_environment

_BEFORE = """
import contextlib, io
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
import jaxdist
from jaxdist import fit

jaxdist.testing.virtual_devices(2)
rng = np.random.default_rng(0)
x = rng.normal(size=(96, 4)).astype("float32")
y = x.sum(1, keepdims=True)

def make_model():
    with jaxdist.MirroredStrategy().scope():
        model = fit.Model(nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
        model.compile(optimizer=optax.sgd(0.1), loss="mse", metrics=["mae"])
    return model

model = make_model()
"""
_STOPS = """
class Stop(fit.Callback):
    def on_train_batch_end(self, batch, logs):
        if batch == 2:
            raise ValueError("in the middle")

model.fit(x, y, batch_size=16, epochs=3, callbacks=[Stop()])
"""
_RUN = """
from rich.console import Console
from jaxdist.jobs._run.progress import TrainingProgress

console, other = Console(), Console(file=io.StringIO(), width=80)
with TrainingProgress(400, console=console, unit="images") as progress:
    for step in range(1, 401):
        progress.advance(step)
        if step % 100 == 0:
            progress.report(step, loss=0.5, speed=1000.0, seconds_left=4.0 - step / 100)
with TrainingProgress(4, console=other, unit="images") as progress:
    progress.report(4, loss=0.5, speed=1000.0, seconds_left=0.0)
other.file.getvalue()
"""


class _Kernel:
    """A kernel that runs cells, and keeps their messages."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, source: str) -> list[tuple[str, Any]]:
        """Run a cell, and return the kinds and contents of the messages with output."""
        found: list[tuple[str, Any]] = []
        self._client.execute_interactive(
            source,
            timeout=120,
            output_hook=lambda message: found.append((message["msg_type"], message["content"])),
        )
        return _join_streams([x for x in found if x[0] not in {"status", "execute_input"}])

    def run_quietly(self, source: str) -> None:
        assert self.run(source) == []


def _join_streams(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Join what a kernel sent in several messages: it sends a stream at times of its own."""
    joined: list[tuple[str, Any]] = []
    for kind, content in found:
        last = joined[-1] if joined else ("", {})
        if kind == last[0] == "stream" and content["name"] == last[1]["name"]:
            content = {**content, "text": last[1]["text"] + content["text"]}
            joined.pop()
        joined.append((kind, content))
    return joined


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Kernel]:
    folder = tmp_path_factory.mktemp("kernel")
    manager, client = start_new_kernel(env=make_environment(), cwd=str(folder))
    try:
        kernel = _Kernel(client)
        kernel.run_quietly(_BEFORE)
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _displays(found: list[tuple[str, Any]]) -> list[Any]:
    return [content for kind, content in found if kind.endswith("display_data")]


def _assert_one_output(found: list[tuple[str, Any]]) -> None:
    """Check that everything is one output, with a form for frontends with and without HTML."""
    kinds = [kind for kind, _ in found]
    assert kinds[0] == "display_data"
    assert set(kinds[1:]) <= {"update_display_data"}
    assert len({content["transient"]["display_id"] for content in _displays(found)}) == 1
    for content in _displays(found):
        assert set(content["data"]) == {"text/plain", "text/html"}
        plain = re.sub(r"\s+", " ", content["data"]["text/plain"]).strip()
        shown = re.sub(r"<[^>]+>", "", content["data"]["text/html"].replace("</pre>", "\n"))
        assert re.sub(r"\s+", " ", html.unescape(shown)).strip() == plain


def test_fit_updates_one_output_and_its_last_form_has_all_epochs(kernel: _Kernel) -> None:
    found = kernel.run("history = model.fit(x, y, batch_size=16, epochs=3, validation_split=0.2)")
    _assert_one_output(found)
    lines = _displays(found)[-1]["data"]["text/plain"].splitlines()
    pattern = r"epoch {}/3  [\d.]+ s  loss [\d.e-]+  mae [\d.e-]+  val_loss [\d.e-]+  val_mae \S+"
    assert len(lines) == 3
    for epoch, line in enumerate(lines, 1):
        assert re.fullmatch(pattern.format(epoch), line)
    assert "<progress" in _displays(found)[0]["data"]["text/html"]
    assert "<progress" not in _displays(found)[-1]["data"]["text/html"]


def test_the_bar_of_an_epoch_that_an_error_ends_stays(kernel: _Kernel) -> None:
    found = kernel.run(_STOPS)
    assert found[-1][0] == "error"
    _assert_one_output(found[:-1])
    last = _displays(found)[-1]["data"]
    # Two steps are known; the error came in the third one.
    assert re.fullmatch(r"epoch 1/3  3/6  loss [\d.e-]+  mae [\d.e-]+", last["text/plain"])
    assert '<progress value="3" max="6">' in last["text/html"]


def test_a_training_that_resumes_says_so_in_its_output(kernel: _Kernel) -> None:
    source = """model.fit(x, y, batch_size=16, epochs={}, callbacks=[
    fit.ModelCheckpoint("saved <b>", resume=True)]);"""
    kernel.run(source.format(1))
    found = kernel.run(source.format(2))
    _assert_one_output(found)
    first, last = _displays(found)[-1]["data"]["text/plain"].splitlines()
    assert first.startswith("resumes after epoch 1 (")
    assert last.startswith("epoch 2/2  ")
    [only] = _displays(kernel.run(source.format(2)))
    assert only["data"]["text/plain"].startswith("all 2 epochs are trained")
    assert "saved &lt;b&gt;" in only["data"]["text/html"]


_REPORTS = """
def step(w, x):
    return w - 0.1 * jaxdist.get_replica_context().all_reduce("sum", w * x.mean())

strategy = model.strategy
args = (jnp.ones(3), jax.device_put(x, strategy.per_replica_sharding))
program = strategy.lower(step, args)
"""


def test_a_report_as_the_last_line_is_one_output(kernel: _Kernel) -> None:
    kernel.run_quietly(_REPORTS)
    for source, words in (
        ("model.summary()", "kernel"),
        ("jaxdist.explain(strategy)", "MirroredStrategy: 2 replicas"),
        ("jaxdist.explain({'weights': args[0]})", "Memory of a device"),
        ("jaxdist.explain(program)", "Collectives of step"),
        ("program.explain()", "Asked for"),
        ("program", "Program step for 2 replica(s)"),
        ("strategy.check_gradients(step, args)", "GradientReport: 2 replicas"),
    ):
        [(kind, content)] = kernel.run(source)
        assert kind == "execute_result", source
        assert set(content["data"]) == {"text/plain", "text/html"}
        for text in content["data"].values():
            assert text.count(words) == 1, source
        # What a frontend without HTML shows has no line that it would break.
        assert max(map(len, content["data"]["text/plain"].splitlines())) <= 100
        # A cell has the name that tracebacks give it; its file is temporary.
        is_of_step = "program" in source
        for text in content["data"].values():
            assert bool(re.search(r"In\[\d+\]:2 \(step\)", text)) == is_of_step
            assert "ipykernel" not in text
        [(kind, printed)] = kernel.run(f"print({source})")
        assert kind == "stream"
        assert printed["text"].strip() == content["data"]["text/plain"].strip()


def test_lines_are_text_of_stdout(kernel: _Kernel) -> None:
    given = "x, y, batch_size=16, epochs=2"
    for source, count in (
        (f"model.fit({given}, verbose=2);", 2),
        ("model.evaluate(x, y);", 1),
        (f"model.fit({given}, verbose=0); model.predict(x);", 0),
    ):
        found = kernel.run(source)
        assert {kind for kind, _ in found} <= {"stream"}
        assert all(content["name"] == "stdout" for _, content in found)
        text = "".join(content["text"] for _, content in found)
        assert text.count("\n") == text.count("loss ") == count
        assert "\x1b" not in text


@pytest.mark.parametrize("verbose", ["'auto'", "1", "2"])
def test_output_that_is_redirected_is_text(kernel: _Kernel, verbose: str) -> None:
    fit = f"model.fit(x, y, batch_size=16, epochs=2, verbose={verbose})"
    kernel.run_quietly(f"with contextlib.redirect_stdout(io.StringIO()) as out:\n    {fit};")
    kernel.run_quietly(f"%%capture captured\n{fit}")
    for name in ("out.getvalue()", "captured.stdout"):
        [(_, content)] = kernel.run(name)
        text = content["data"]["text/plain"]
        assert text.count("epoch ") == 2
        assert text.count("loss ") == 2
        assert "\\x1b" not in text


def test_the_bar_of_a_job_is_one_output_and_a_file_gets_lines(kernel: _Kernel) -> None:
    *found, (kind, result) = kernel.run(_RUN)
    _assert_one_output(found)
    last = _displays(found)[-1]["data"]["text/plain"]
    assert last == "step  400/400  loss 0.5000  1,000 images/s  0:00:00 left"
    assert kind == "execute_result"
    assert "step 4/4  loss 0.5000" in result["data"]["text/plain"]


_PROGRAM = """
import sys, rich.console
from jaxdist.fit._loop.progress import as_verbose
from jaxdist.jobs._run.progress import TrainingProgress
with TrainingProgress(4, console=rich.console.Console(), unit="images") as progress:
    progress.report(4, loss=0.5, speed=1000.0, seconds_left=0.0)
print(sys.stdout.isatty(), as_verbose("auto"))
"""


def test_a_program_that_a_cell_starts_prints_lines(kernel: _Kernel) -> None:
    # It has a terminal, and a saved notebook would keep each drawing of a bar.
    # Python warns that "!" forks beside the threads of JAX, and starts the command at once.
    kernel.run_quietly(
        "import pathlib, sys, warnings; warnings.filterwarnings('ignore', 'os.fork')"
    )
    kernel.run_quietly(f"pathlib.Path('program.py').write_text({_PROGRAM!r});")
    found = kernel.run("!{sys.executable} program.py")
    text = "".join(content["text"] for _, content in found)
    lines = ["step 4/4  loss 0.5000  1,000 images/s  0:00:00 left", "True 2"]
    assert text.splitlines() == lines


class _Sent:
    """What `IPython.display.display` and its handles send."""

    def __init__(self) -> None:
        self.outputs: list[list[dict[str, str]]] = []

    def display(self, data: dict[str, str], **_: Any) -> Any:
        updates = [data]
        self.outputs.append(updates)

        class Handle:
            def update(self, data: dict[str, str], **_: Any) -> None:
                updates.append(data)

        return Handle()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> _Sent:
    sent = _Sent()
    monkeypatch.setattr("IPython.display.display", sent.display)
    return sent


class _Clock:
    """Seconds that the test moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bar_moves_at_most_ten_times_a_second_and_the_end_is_always_sent(sent: _Sent) -> None:
    clock = _Clock()
    output = LiveOutput(clock)
    for step in range(1, 641):
        clock.now += 1 / 64
        output.draw("epoch 1/2", step, 641, lambda: ["loss 0.5"])
    [updates] = sent.outputs
    assert 80 <= len(updates) <= 100
    output.add_lines(["epoch 1/2  10.0 s"])
    assert updates[-1]["text/plain"] == "epoch 1/2  10.0 s"
    output.draw("epoch 2/2", 1, 641)
    output.draw("epoch 2/2", 2, 641)
    output.close()
    assert updates[-1]["text/plain"] == "epoch 1/2  10.0 s\nepoch 2/2  2/641"
    count = len(updates)
    output.close()
    assert len(updates) == count


def test_a_thousand_short_epochs_are_a_few_outputs_with_all_lines(sent: _Sent) -> None:
    clock = _Clock()
    output = LiveOutput(clock)
    for epoch in range(1000):
        output.draw(f"epoch {epoch}", 0, 1)
        clock.now += 1e-3
        output.add_lines([f"epoch {epoch} ends"])
    output.close()
    assert len(sent.outputs) == 10
    assert sum(map(len, sent.outputs)) < 50
    lines = "\n".join(updates[-1]["text/plain"] for updates in sent.outputs).splitlines()
    assert lines == [f"epoch {epoch} ends" for epoch in range(1000)]


def test_names_are_escaped_and_an_unknown_length_has_no_bar_that_moves(sent: _Sent) -> None:
    output = LiveOutput(_Clock())
    output.draw("epoch 1/1", 3, None, lambda: ["a<b>&c 0.5"])
    output.add_lines(["a<b>&c 0.5"])
    first, last = (data["text/html"] for data in sent.outputs[0])
    assert "a&lt;b&gt;&amp;c 0.5" in first
    assert "a&lt;b&gt;&amp;c 0.5" in last
    assert "3/?" in first
    assert "<progress" not in first


def test_a_process_that_is_no_kernel_has_no_notebook() -> None:
    # IPython is loaded here, and has no shell.
    assert not of_notebooks.is_kernel()
    assert not of_notebooks.has_notebook()
