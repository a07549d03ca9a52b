"""What `fit` shows on terminals of several widths, and in a pipe."""

import io
import itertools
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from jaxdist import fit
from jaxdist.fit._loop.progress import Progress
from tests.fit.models import make_model, mirrored

_LOGS = {
    "loss": 7.0912,
    "mae": 2.1423,
    "root_mean_squared_error": 2.6631,
    "val_loss": 7.0351,
    "val_root_mean_squared_error": 2.6522,
}


class _Totals:
    def logs(self) -> dict[str, float]:
        return _LOGS


def _run_epochs(verbose: int) -> None:
    totals: Any = _Totals()
    # Each drawing is due.
    progress = Progress(verbose, 10, 5, clock=itertools.count().__next__)
    with progress:
        for epoch in range(10):
            progress.begin(epoch)
            for step in range(5):
                progress.advance(step + 1, totals)
            progress.end(_LOGS)


def _read_terminal(width: int) -> list[str]:
    """Run this file in a terminal, and return the lines that are written, also over others."""
    leader, follower = pty.openpty()
    given = {"COLUMNS": str(width), "LINES": "40", "TERM": "xterm", "NO_COLOR": "1"}
    environment = {**os.environ, **given, "JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.fit.test_progress"], stdout=follower, env=environment
    )
    os.close(follower)
    written = b""
    try:
        while part := os.read(leader, 65536):
            written += part
    except OSError:  # The child has ended.
        pass
    finally:
        os.close(leader)
        assert child.wait(60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    return [line.rstrip() for line in text.replace("\r", "\n").split("\n") if line.strip()]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_epoch_time_and_all_metrics_are_whole_at_every_width(width: int) -> None:
    lines = _read_terminal(width)
    assert max(map(len, lines)) <= width
    # The bar keeps the epoch, and the line at its end has everything.
    for epoch in range(1, 11):
        assert any(line.startswith(f"epoch {epoch}/10 ") and "/5" in line for line in lines)
        assert any(re.match(rf"epoch {epoch}/10  [\d.]+ s  loss 7\.091\b", x) for x in lines)
    for name, shown in (("val_loss", "7.035"), ("val_root_mean_squared_error", "2.652")):
        ends = [line for line in lines if "/5" not in line]
        assert sum(f"{name} {shown}" in line for line in ends) == 10
    assert "8/5" not in "".join(lines)


def test_a_pipe_gets_one_line_for_each_epoch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxdist.fit._loop.progress.make_console", lambda: Console(width=60))
    _run_epochs(2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("epoch 10/10  loss 7.091  mae 2.142  root_mean_squared_error 2.663")


if __name__ == "__main__":
    _run_epochs(1)


def test_an_early_stop_does_not_break_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = io.StringIO()
    progress = Progress(1, 5, 1)
    progress._console = Console(file=out, width=60, force_terminal=True, no_color=True)
    stopping = fit.EarlyStopping("loss", patience=1)
    model = make_model(mirrored(1))
    model.history.add(0, {"loss": 1.0})
    stopping.set_model(model)
    with progress:
        stopping.on_train_begin({})
        for epoch, loss in enumerate((1.0, 2.0)):
            progress.begin(epoch)
            progress.end({"loss": loss})
            stopping.on_epoch_end(epoch, {"loss": loss})
        stopping.on_train_end({})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", out.getvalue()).replace("\r", "\n")
    lines = [line.rstrip() for line in shown.split("\n") if line.strip()]
    assert max(map(len, lines)) <= 60
    assert lines[-2:] == [
        "Early stop after epoch 2: the best is loss 1 of epoch 1. The",
        "weights of epoch 2 stay (restore_best_weights=False).",
    ]
