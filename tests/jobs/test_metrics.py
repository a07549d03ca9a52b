"""The metrics file, the picture, and the packages they need."""

import json
import math
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxdist._checkpoints import replace_file
from jaxdist._validate import Extra
from jaxdist.errors import ArgumentError, MissingExtraError
from jaxdist.jobs import Curve, versions
from jaxdist.jobs._run.metrics import History, draw_learning_curve, write_metrics
from jaxdist.training import EXTRAS, require_extra

_HISTORY = History([2.0, 1.0, 0.5], [{"step": 3, "loss": 0.6, "accuracy": 0.9}])
_CURVE = Curve("accuracy", "held-out accuracy (%)", factor=100.0)


def test_metrics_come_back_as_they_were(tmp_path: Path) -> None:
    metrics = {"accuracy": 0.99, "losses": [1.5, 0.25], "config": {"a": None}}
    write_metrics(tmp_path / "m.json", metrics)
    assert json.loads((tmp_path / "m.json").read_text()) == metrics


def test_the_picture_is_a_png_and_nothing_else_is_left(tmp_path: Path) -> None:
    draw_learning_curve(tmp_path / "curve.png", _HISTORY, _CURVE, title="digits")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]


def test_the_evaluation_with_the_smallest_loss_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {10: 0.9, 20: 0.3, 30: math.nan, 40: 0.5}
    evaluations = [{"step": n, "loss": loss, "accuracy": 0.5} for n, loss in losses.items()]
    drawn: list[Any] = []
    save = Figure.savefig

    def keep(figure: Any, *args: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    history = History([1.0] * 40, evaluations)
    draw_learning_curve(tmp_path / "curve.png", history, _CURVE, title="digits")
    for axes in drawn[0].axes:
        assert axes.get_lines()[-1].get_xdata()[0] == 20
        assert axes.get_lines()[-1].get_label() == "step 20: best held-out loss"


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    replace_file(path, b"old")

    def full() -> Iterator[bytes]:
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_file(path, full())
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]


def test_versions_name_python_jax_and_what_a_result_depends_on() -> None:
    found = versions()
    assert found["python"].count(".") == 2
    assert {"jax", "jaxlib", "flax", "optax", "numpy", "jaxdist"} <= found.keys()


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda e: e.name)
def test_a_missing_extra_is_an_error_with_the_install_command(
    extra: Extra, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, extra.module, None)
    with pytest.raises(MissingExtraError) as caught:
        require_extra(extra.name, "draw the curve")
    assert f"{extra.name} is needed to draw the curve" in str(caught.value)
    assert extra.install_command in str(caught.value)
    assert extra.install_command.startswith("pip install ")


def test_an_extra_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(ArgumentError, match="scikit-learn"):
        require_extra("sklearn", "load the digits")


def test_the_extras_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    declared = project["project"]["optional-dependencies"].keys()
    assert declared - {e.name for e in EXTRAS} <= {"dev", "docs", "examples", "test"}
    assert {e.name for e in EXTRAS} <= declared


def test_what_an_error_says_to_install_is_what_the_extra_of_the_package_has() -> None:
    root = Path(__file__).parent.parent.parent
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = declared["optional-dependencies"]
    for extra in EXTRAS:
        assert extras[extra.name] == extra.packages
        if not extra.requirements:
            assert extra.install_command == f"pip install {' '.join(extra.packages)}"
            continue
        # The requirements of this Python, without their markers.
        is_old = sys.version_info < (3, 12)
        mine = "; python_version < '3.12'" if is_old else "; python_version >= '3.12'"
        here = [r.removesuffix(mine) for r in extra.requirements if r.endswith(mine)]
        command = extra.install_command.replace('"', "")
        assert command == f"pip install {' '.join(here)}"


def test_nobody_is_told_to_install_a_package_that_is_not_published() -> None:
    root = Path(__file__).parent.parent.parent
    # A folder, `./jaxdist[examples]`, is a checkout, and `jaxdist-0.1.0-py3-none-any.whl` a file.
    told = re.compile(r"pip install '?jaxdist(?!-)|(?<!\./)jaxdist\[")
    texts = [*root.glob("jaxdist/**/*.py"), *root.glob("docs/**/*.md"), root / "README.md"]
    texts += root.glob("notebooks/*.ipynb")
    assert [str(p) for p in texts if told.search(p.read_text())] == []


def test_a_history_takes_the_loss_and_the_other_numbers_of_steps_that_it_does_not_have() -> None:
    history = History().after(2, [{"loss": 2.0, "dropped": 0.5}, {"loss": 1.0, "dropped": 0.25}])
    assert (history.losses, history.measures) == ([2.0, 1.0], {"dropped": [0.5, 0.25]})
    # An earlier step, and results of which only the first belongs to a step that is asked for.
    assert history.after(1, [{"loss": 9.0, "dropped": 9.0}]).measures == {"dropped": [0.5]}
    later = history.after(3, [{"loss": 0.5, "dropped": 0.0}, {"loss": 9.0, "dropped": 9.0}])
    assert (later.losses, later.measures) == ([2.0, 1.0, 0.5], {"dropped": [0.5, 0.25, 0.0]})
    assert _HISTORY.after(4, [0.25]).losses == [2.0, 1.0, 0.5, 0.25]
    # A number that only some steps return is nan for the others.
    later.add([0.25, {"loss": 0.125, "kept": 1.0}])
    assert later.losses[3:] == [0.25, 0.125]
    np.testing.assert_equal(later.measures["dropped"][3:], [np.nan, np.nan])
    np.testing.assert_equal(later.measures["kept"], [*[np.nan] * 4, 1.0])


def test_results_of_steps_that_have_failed_are_not_read() -> None:
    class Failed:
        def __float__(self) -> float:
            raise RuntimeError("The step has failed.")

    assert History().after(2, [2.0, 1.0, Failed(), Failed()]).losses == [2.0, 1.0]
    assert _HISTORY.after(3, [Failed()]).losses == _HISTORY.losses
