"""Cells start programs with the Python of their kernel, whatever the PATH has."""

import ast
import json
import pathlib
import re
from collections.abc import Iterator

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from jaxdist.cli import main
from tests.test_documentation import PAGES
from tools import notebooks

# The name of a program that the PATH finds, after variables of its environment.
_FOUND_BY_PATH = re.compile(r"\s*(?:\w+=\S*\s+|sudo\s+)*(?:python[\d.]*|pip[\d.]*|jaxdist)(?:\s|$)")
_CELL_OF_PAGE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHELLS = {"system", "getoutput", "sx", "!", "bash", "sh", "script"}
_STARTERS = {"run", "Popen", "check_call", "check_output", "call"}


def _find_commands_by_path(source: str) -> Iterator[str]:
    """Yield commands of a cell that start another Python than that of the kernel."""
    for node in ast.walk(ast.parse(TransformerManager().transform_cell(source))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = node.func.attr
        texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
        texts = [text for text in texts if isinstance(text, str)]
        if name in {"run_line_magic", "run_cell_magic"} and texts[0] in _SHELLS:
            name, texts = "system", texts[1:]
        if name in _STARTERS and node.args and isinstance(node.args[0], ast.List):
            first = node.args[0].elts[0]
            texts = [first.value] if isinstance(first, ast.Constant) else []
        elif name not in {"system", "getoutput"}:
            continue
        for part in re.split(r"[|;&\n]+", "\n".join(map(str, texts))):
            if _FOUND_BY_PATH.match(part):
                yield part.strip()


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("!python train.py", 1),
        ("!jaxdist info", 1),
        ("!pip install jaxdist", 1),
        ("!pip3.11 install jaxdist", 1),
        ("x = 1\n[line] = !A=b jaxdist info 2>/dev/null", 1),
        ("if True:\n    !cd x && python -m pip list | grep jax", 1),
        ("%%bash\ncd x\npython train.py\njaxdist info", 2),
        ("%sx jaxdist info", 1),
        ("import os\nos.system('jaxdist info')", 1),
        ("import subprocess\nsubprocess.run(['jaxdist', 'info'])", 1),
        ("!{sys.executable} -m jaxdist info | grep python", 0),
        ("!ls python jaxdist", 0),
        ("%pip install jaxdist", 0),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'jaxdist'])", 0),
        ("%%writefile train.py\nimport jaxdist", 0),
        ("print('!python')  # !python", 0),
    ],
)
def test_commands_that_the_path_finds_are_seen(source: str, count: int) -> None:
    assert len(list(_find_commands_by_path(source))) == count


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_starts_programs_with_its_own_python(name: str) -> None:
    for cell in notebooks.read_notebook(notebooks.find_notebook(name)).cells:
        if cell.cell_type == "code":
            assert list(_find_commands_by_path(cell.source)) == []


def test_the_notebook_of_a_new_project_starts_programs_with_its_own_python(
    tmp_path: pathlib.Path,
) -> None:
    assert main(["new", str(tmp_path / "flowers")]) == 0
    notebook = json.loads((tmp_path / "flowers" / "flowers.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert list(_find_commands_by_path("".join(cell["source"]))) == []


def test_cells_of_pages_start_programs_with_their_own_python() -> None:
    cells = [cell for page in PAGES for cell in _CELL_OF_PAGE.findall(page.read_text())]
    assert len(cells) > 50
    for cell in cells:
        assert list(_find_commands_by_path(cell)) == []
