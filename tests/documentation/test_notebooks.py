"""Notebooks run with 8, 2 and 1 devices, leave no process, and are saved with their outputs."""

import importlib.metadata
import pathlib
import re
import sys
import types
from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import jaxdist
from tests.documentation.kernels import find_marked, marked_environment, start_and_kill, wait_until
from tests.test_documentation import read_links
from tools import notebooks

# What only one machine or run has: paths, addresses of objects, files of cells.
OF_ONE_RUN = re.compile(r"/tmp/|/home/|/root/|/work/|/usr/|ipykernel_| at 0x[0-9a-f]{6}")
# A notebook says what more devices show, or that it does not matter.
ABOUT_MORE = re.compile(r"\bWith (more|2|8)\b|with one device and with 8")


def _read(name: str) -> Any:
    return notebooks.read_notebook(notebooks.find_notebook(name))


def _code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _texts(cell: Any) -> list[str]:
    """What a cell shows as text."""
    found = [output.get("data", output) for output in cell.outputs]
    return [
        data[key] for data in found for key in ("text", "text/plain", "text/html") if key in data
    ]


def _find_faults(cell: Any) -> list[str]:
    """Outputs of a cell that nobody should see."""
    faults = [str(output) for output in cell.outputs if output.output_type == "error"]
    faults += [output.text for output in cell.outputs if output.get("name") == "stderr"]
    return faults + [text for text in _texts(cell) if "Traceback (most recent" in text]


def _kinds(cell: Any) -> set[str]:
    """Whether a cell prints, and whether it draws."""
    pictures = any("image/png" in output.get("data", {}) for output in cell.outputs)
    return {"picture"} if pictures else {"text"} if cell.outputs else set()


def test_the_tool_lists_all_notebooks() -> None:
    assert sorted(notebooks.NAMES) == sorted(p.stem for p in notebooks.FOLDER.iterdir())


def test_the_home_page_lists_all_notebooks() -> None:
    page = (notebooks.ROOT / "docs" / "index.md").read_text()
    listed = re.findall(r"^- \[.+\]\(\.\./notebooks/(\w+)\.ipynb\)", page, re.MULTILINE)
    assert sorted(listed) == sorted(notebooks.NAMES)


def test_readme_counts_all_notebooks() -> None:
    more = {9: "nine", 10: "ten", 11: "eleven", 12: "twelve"}[len(notebooks.NAMES) - 1]
    assert f"[{more} more](docs/index.md#notebooks)" in (notebooks.ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_begins_with_the_line_and_the_cell_for_colab(name: str) -> None:
    notebook = _read(name)
    assert 8 <= len(notebook.cells) <= 20
    before = [cell.source for cell in notebook.cells]
    notebooks.set_first_cells(notebook, name)
    assert [cell.source for cell in notebook.cells] == before, "run `python -m tools.notebooks`"
    assert notebooks.UPLOAD in before[0]
    assert notebook.cells[1].source == notebooks.write_setup(name)


def test_the_page_for_colab_has_the_first_cell() -> None:
    page = (notebooks.ROOT / "docs" / "machines" / "colab-and-kaggle.md").read_text()
    assert notebooks.write_setup("quick_start") in page


@pytest.mark.parametrize("missing", [True, False])
def test_the_first_cell_asks_pip_to_keep_jax_and_its_plugins(
    missing: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2", "numpy": "2.4"}
    versions |= {"libtpu": "0.0.42", "jaxdist": "0.1.0"}
    if missing:
        del versions["jaxdist"]

    def find_version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    (tmp_path / "jaxdist-0.1.0-py3-none-any.whl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", find_version)
    named = [types.SimpleNamespace(name=name) for name in [*versions, None]]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: named)
    monkeypatch.setattr(jaxdist.testing, "virtual_devices", lambda _: None)
    # The shell sets prompts, which say that the interpreter continues after an error.
    for prompt in ("ps1", "ps2", "ps3"):
        monkeypatch.setattr(sys, prompt, "", raising=False)
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    commands: list[str] = []
    shell.register_magic_function(commands.append, magic_name="pip")
    shell.run_cell(notebooks.write_setup("keras_fit")).raise_error()
    keep = "jax==0.10.2 jax-cuda12-plugin==0.10.2 jaxlib==0.10.2 libtpu==0.0.42"
    wheel = "jaxdist-0.1.0-py3-none-any.whl[examples,keras]"
    assert commands == ([f'install --quiet "{wheel}" {keep}'] if missing else [])


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_links_of_a_notebook_lead_to_files(name: str) -> None:
    for cell in _read(name).cells:
        if cell.cell_type == "markdown":
            for link in read_links(cell.source):
                is_there = (notebooks.FOLDER / link).exists()
                assert link.startswith("https://") or is_there, f"{link}: no such file"


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_is_saved_with_the_outputs_of_one_run_and_no_error(name: str) -> None:
    notebook = _read(name)
    cells = _code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert _find_faults(cell) == [], cell.source
        assert not [text for text in _texts(cell) if OF_ONE_RUN.search(text)], cell.source
    assert any(_kinds(cell) == {"picture"} for cell in cells), "looking beats reading"
    assert notebooks.clean_notebook(notebook) == notebook, "run `python -m tools.notebooks`"


def test_an_error_a_warning_or_a_traceback_in_an_output_is_found() -> None:
    new = nbformat.v4
    outputs = [
        new.new_output("error", ename="ValueError", evalue="no", traceback=[]),
        new.new_output("stream", name="stderr", text="warning"),
        new.new_output("stream", name="stdout", text="Traceback (most recent call last)"),
    ]
    for output in outputs:
        assert _find_faults(new.new_code_cell("x", outputs=[output]))
    plain = new.new_output("stream", name="stdout", text="x at 0x7f32a0 in /tmp/x/ipykernel_3/4.py")
    cleaned = notebooks.clean_notebook(
        new.new_notebook(cells=[new.new_code_cell("x", outputs=[plain])])
    )
    assert cleaned.cells[0].outputs[0].text == "x in cell"


# Each with 8 devices, and with 1 or 2; the other one belongs to the long rows.
RUNS = [
    pytest.param(name, devices, marks=marks, id=f"{devices}-{name}")
    for number, name in enumerate(notebooks.NAMES)
    for devices, marks in (
        (8, ()),
        (1 + number % 2, (pytest.mark.slow, *[pytest.mark.long] * (number % 3 > 0))),
        (2 - number % 2, (pytest.mark.slow, pytest.mark.long)),
    )
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "devices"), RUNS)
def test_a_notebook_runs_and_leaves_no_process(
    name: str, devices: int, tmp_path: pathlib.Path
) -> None:
    saved = _read(name)
    with marked_environment(notebooks.make_environment()) as (env, run):
        ran = notebooks.run_notebook(saved, tmp_path, devices, env)
        wait_until(lambda: not find_marked(run), 30)
    for before, cell in zip(_code_cells(saved), _code_cells(ran), strict=True):
        assert _find_faults(cell) == [], cell.source
        assert _kinds(cell) == _kinds(before), cell.source
    if devices == 1:
        said = [text for cell in _code_cells(ran) for text in _texts(cell)]
        assert any(ABOUT_MORE.search(text) for text in said)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "cell", "processes"),
    [
        ("two_processes", "def train()", 3),
        # The kernel, the launcher, the chief, two servers and two workers.
        ("parameter_servers", "!JAX_PLATFORMS=cpu {sys.executable} -m jaxdist launch", 7),
    ],
)
def test_a_kernel_that_is_killed_in_the_middle_leaves_no_process(
    name: str, cell: str, processes: int, tmp_path: pathlib.Path
) -> None:
    sources = [cell.source for cell in _code_cells(_read(name))]
    last = next(number for number, source in enumerate(sources) if cell in source)
    with marked_environment(notebooks.make_environment()) as (env, run):
        seen = start_and_kill(sources[:last], sources[last], env, tmp_path, run, processes)
        assert len(seen) >= processes
        wait_until(lambda: not find_marked(run), 60)
