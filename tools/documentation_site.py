"""What mkdocs calls while it builds the site: pages that are generated, and links out of docs/.

`mkdocs.yml` names this file as a hook. mkdocs is no dependency, so it is imported by name here.
"""

import importlib
import json
import os
import pathlib
import re
from typing import Any

from tools import api_pages

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
API = "reference/api"


def _as_page(notebook: pathlib.Path) -> str:
    """The cells of a notebook as Markdown, with the text that they print."""
    parts: list[str] = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = ["".join(o["text"]) for o in cell.get("outputs", []) if "text" in o]
        parts += [f"```text\n{text.rstrip()}\n```" for text in printed]
    return "\n\n".join(parts) + "\n"


def list_outside_pages() -> dict[pathlib.Path, str]:
    """Files outside of docs/ that are pages of the site, and their places in it."""
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    pages = {path: f"notebooks/{path.stem}.md" for path in notebooks}
    return {ROOT / "CHANGELOG.md": "changelog.md", **pages}


def generate_pages() -> dict[str, str]:
    """The text of each generated page, by its place in the site."""
    pages = {f"{API}/{name}.md": api_pages.write_page(name) for name in api_pages.list_modules()}
    for path, place in list_outside_pages().items():
        text = _as_page(path) if path.suffix == ".ipynb" else path.read_text()
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
    notebooks = [place for place in pages.values() if place.startswith("notebooks/")]
    for section in config.nav:
        if "Reference" in section:
            section["Reference"] += [{"API": api}, {"Changelog": pages[ROOT / "CHANGELOG.md"]}]
        if "Start" in section:
            section["Start"].append({"Notebooks": notebooks})
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
    for place, text in generate_pages().items():
        files.append(file.generated(config, place, content=text))
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
    if not (DOCS / place).exists():
        return markdown
    return move_links(markdown, (DOCS / place).parent, place)
