"""What mkdocs calls while it builds the site: pages that are generated, and links out of docs/.

`mkdocs.yml` names this file as a hook. mkdocs is no dependency, so it is imported by name here.
"""

import base64
import importlib
import json
import os
import pathlib
import re
import textwrap
from typing import Any

from tools import api_pages, notebooks

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
API = "reference/api"
# Files in capitals beside README.md.
OF_THE_PROJECT = ("changelog", "contributing", "security")
_COLUMNS = 80
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def _as_page(name: str) -> str:
    """The cells of a notebook as Markdown, with what they print and draw."""
    parts: list[str] = []
    for number, cell in enumerate(_read_cells(name)):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for order, output in enumerate(cell.get("outputs", [])):
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", "")))
            if "image/png" in data:
                parts.append(f"![Output of the cell]({name}_{number}_{order}.png)")
            elif text:
                parts.append(f"```text\n{_wrap(_COLOURS.sub('', text).rstrip())}\n```")
    return "\n\n".join(parts) + "\n"


def _wrap(text: str) -> str:
    """Break sentences at the width of a page, and leave tables alone."""
    lines: list[str] = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        is_table = "  " in line.strip()
        broken = textwrap.wrap(line, _COLUMNS, subsequent_indent=indent, break_on_hyphens=False)
        lines += [line] if is_table or not broken else broken
    return "\n".join(lines)


def _read_cells(name: str) -> list[dict[str, Any]]:
    return json.loads(notebooks.find_notebook(name).read_text())["cells"]


def generate_pictures() -> dict[str, bytes]:
    """What the notebooks draw, by its place in the site."""
    return {
        f"notebooks/{name}_{number}_{order}.png": base64.b64decode(output["data"]["image/png"])
        for name in notebooks.NAMES
        for number, cell in enumerate(_read_cells(name))
        for order, output in enumerate(cell.get("outputs", []))
        if "image/png" in output.get("data", {})
    }


def list_outside_pages() -> dict[pathlib.Path, str]:
    """Files outside of docs/ that are pages of the site, and their places in it."""
    pages = {notebooks.find_notebook(name): f"notebooks/{name}.md" for name in notebooks.NAMES}
    texts = {ROOT / f"{name.upper()}.md": f"{name}.md" for name in OF_THE_PROJECT}
    return {**texts, **pages}


def generate_pages() -> dict[str, str]:
    """The text of each generated page, by its place in the site."""
    pages = {f"{API}/{name}.md": api_pages.write_page(name) for name in api_pages.list_modules()}
    for path, place in list_outside_pages().items():
        text = _as_page(path.stem) if path.suffix == ".ipynb" else path.read_text()
        pages[place] = move_links(text, path.parent, place)
    return pages


def move_links(text: str, folder: pathlib.Path, place: str) -> str:
    """Return a page whose links to files lead to their places in the site."""
    outside = list_outside_pages()

    def move(link: re.Match[str]) -> str:
        target, sign, anchor = link[1].partition("#")
        if not target or target.startswith("https://"):
            return link[0]
        there = pathlib.Path(os.path.normpath(folder / target))
        if there.is_relative_to(DOCS):
            page = str(there.relative_to(DOCS))
        elif there == ROOT / "README.md":
            page = "index.md"
        elif there.parent == notebooks.FOLDER and there.suffix == ".png":
            page = f"notebooks/{there.name}"
        else:
            page = outside.get(there, target)
        return f"]({os.path.relpath(page, pathlib.PurePath(place).parent)}{sign}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)(?!\])", move, text)


def on_config(config: Any) -> Any:
    """Add the generated pages to the navigation.

    Args:
        config: The configuration of mkdocs.

    Returns:
        The same object.
    """
    api = [{name: f"{API}/{name}.md"} for name in api_pages.list_modules()]
    pages = list_outside_pages()
    books = [place for place in pages.values() if place.startswith("notebooks/")]
    for section in config.nav:
        if "Reference" in section:
            texts = [{name.capitalize(): f"{name}.md"} for name in OF_THE_PROJECT]
            section["Reference"] += [{"API": api}, *texts]
        if "Start" in section:
            section["Start"].append({"Notebooks": books})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the files.

    Args:
        files: The files that mkdocs has found.
        config: The configuration of mkdocs.

    Returns:
        The same object.
    """
    file = importlib.import_module("mkdocs.structure.files").File
    for place, content in {**generate_pages(), **generate_pictures()}.items():
        files.append(file.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page of docs/ with links that lead to pages of the site.

    Args:
        markdown: The text.
        page: The page of mkdocs.
        **_: What else mkdocs passes.

    Returns:
        The text.
    """
    place = page.file.src_uri
    if place.startswith("design/"):
        # They have the words that users look for, and no answers for them.
        page.meta["search"] = {"exclude": True}
    if not (DOCS / place).exists():
        return markdown
    return move_links(markdown, (DOCS / place).parent, place)
