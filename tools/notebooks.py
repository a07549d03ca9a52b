"""`python -m tools.notebooks [NAME ...]`: run notebooks on 8 CPU devices, and save their outputs.

Without names it runs all of notebooks/. It also writes the line under the title and the first code
cell, which are the same in all notebooks. It saves nothing that changes from run to run by itself,
such as times of execution.
"""

import copy
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
# In the order in which a reader meets them.
NAMES = (
    "quick_start",
    "own_data",
    "custom_loop_on_tpu",
    "keras_fit",
    "model_parallel",
    "seven_layouts",
    "collectives",
    "two_processes",
    "parameter_servers",
    "porting",
    "kaggle_tpu",
)
# Of pyproject.toml, beside `examples`.
EXTRAS = {"keras_fit": "keras", "two_processes": "cloudpickle", "parameter_servers": "grpcio"}
# A cell that waits for longer hangs.
CELL_SECONDS = 240
# Under the title: what a reader in Colab or Kaggle needs.
UPLOAD = (
    "In Colab and Kaggle, upload this notebook and the wheel of jaxdist "
    "([how](../docs/machines/colab-and-kaggle.md))."
)
_DEVICES = "virtual_devices(8)"
_TEXTS = {"text", "text/plain", "text/html"}
# What differs between runs and machines, and what is saved in its place.
_OF_THIS_RUN = {
    # IPython's file of a cell.
    r"[\w/.-]*/ipykernel_\d+/\d+\.py": "cell",
    r"[\w/.-]*/site-packages/": "",
    r" at 0x[0-9a-f]+": "",
}


def write_setup(name: str) -> str:
    """Return the first code cell: it installs jaxdist where it is missing, and asks for devices."""
    extras = ",".join(filter(None, ("examples", EXTRAS.get(name))))
    return f"""import importlib.metadata
from glob import glob

try:
    importlib.metadata.version("jaxdist")
except importlib.metadata.PackageNotFoundError:  # in Colab and Kaggle
    files = glob("jaxdist-*.whl")
    files += glob("/kaggle/input/**/jaxdist-*.whl", recursive=True)
    wheel = max(files, default="jaxdist-0.1.0-py3-none-any.whl")
    # JAX and its plugins stay as they are. If pip says that they conflict with
    # jaxdist, write "jax[tpu]", "jax[cuda12]" or "jax" (CPU) instead of {{keep}},
    # and restart the session.
    names = {{d.name for d in importlib.metadata.distributions()}} - {{None}}
    ours = sorted(n for n in names if n.startswith(("jax", "libtpu")))
    keep = " ".join(f"{{n}}=={{importlib.metadata.version(n)}}" for n in ours)
    %pip install --quiet "{{wheel}}[{extras}]" {{keep}}

import jaxdist

# Eight devices of the CPU. On a machine with TPUs or GPUs, jaxdist uses those.
jaxdist.testing.{_DEVICES}"""


def find_notebook(name: str) -> pathlib.Path:
    """The file of a notebook."""
    return FOLDER / f"{name}.ipynb"


def read_notebook(path: pathlib.Path) -> Any:
    """Return a notebook as nbformat's object."""
    return nbformat.read(path, as_version=4)


def make_environment() -> dict[str, str]:
    """The environment of a kernel: the CPU, this tree, and none of the commands of this Python.

    Kernels often run without their environment on the PATH.
    """
    own = str(pathlib.Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    # What a run of the tests sets is for their own processes.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX")}
    return {
        **inherited,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join(part for part in path if part != own),
    }


def run_notebook(
    notebook: Any, folder: pathlib.Path, num_devices: int, env: Mapping[str, str]
) -> Any:
    """Run all cells in a kernel of their own, and return the notebook with outputs.

    Args:
        notebook: What `read_notebook` returns; it does not change.
        folder: The working directory.
        num_devices: Of the CPU, in place of 8.
        env: The environment of the kernel.
    """
    ran = copy.deepcopy(notebook)
    sources = [cell.source for cell in ran.cells]
    for cell in ran.cells:
        cell.source = cell.source.replace(_DEVICES, f"virtual_devices({num_devices})")
    client = nbclient.NotebookClient(
        ran, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute(env=dict(env))
    for cell, source in zip(ran.cells, sources, strict=True):
        cell.source = source
    return ran


def clean_notebook(notebook: Any) -> Any:
    """Return a notebook without what differs between runs: times, ids, addresses of objects."""
    cleaned = copy.deepcopy(notebook)
    cleaned.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(cleaned.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = dict[str, Any]()
        if cell.cell_type == "code":
            cell.outputs = _join_streams([_clean_output(output) for output in cell.outputs])
    return cleaned


def _clean_output(output: Any) -> Any:
    for texts in (output, output.get("data", {})):
        for key in _TEXTS & set(texts):
            text = texts[key].replace(f"{ROOT}{os.sep}", "")
            for pattern, short in _OF_THIS_RUN.items():
                text = re.sub(pattern, short, text)
            texts[key] = text
    return output


def _join_streams(outputs: list[Any]) -> list[Any]:
    """Return outputs in which texts that were printed one after the other are one."""
    joined: list[Any] = []
    for output in outputs:
        before = joined[-1] if joined else {}
        if output.output_type == "stream" and before.get("name") == output.name:
            before["text"] += output.text
        else:
            joined.append(output)
    return joined


def set_first_cells(notebook: Any, name: str) -> None:
    """Write the line under the title, and the first code cell."""
    title, *rest = notebook.cells[0].source.splitlines()
    text = "\n".join(line for line in rest if line != UPLOAD).strip()
    notebook.cells[0].source = "\n\n".join([title, UPLOAD, text])
    next(cell for cell in notebook.cells if cell.cell_type == "code").source = write_setup(name)


def main() -> None:
    """Run the notebooks that are named, or all, and write them."""
    for name in sys.argv[1:] or NAMES:
        notebook = read_notebook(find_notebook(name))
        set_first_cells(notebook, name)
        with tempfile.TemporaryDirectory() as folder:
            ran = run_notebook(notebook, pathlib.Path(folder), 8, make_environment())
        nbformat.write(clean_notebook(ran), find_notebook(name))
        print(name)


if __name__ == "__main__":
    main()
