"""The site: its navigation, its generated pages, and its build where mkdocs is installed."""

import importlib
import importlib.util
import inspect
import json
import pathlib
import re
import subprocess
import sys
import types
from typing import Any

import pytest

from tests.test_documentation import COLUMNS, PAGES, ROOT, read_blocks
from tools import api_order, api_pages, configuration_page, documentation_site

DOCS = ROOT / "docs"


def test_the_configuration_reference_has_every_entry_as_it_is_now() -> None:
    assert configuration_page.list_missing_meanings() == []
    assert configuration_page.PAGE.read_text() == configuration_page.write_page(), (
        "run `python -m tools.configuration_page`"
    )


@pytest.mark.parametrize("module", api_pages.list_modules())
def test_the_api_reference_has_every_name_that_a_module_has(module: str) -> None:
    listed = {name.name for name in api_pages.list_names() if name.module == module}
    hidden = set(api_order.HIDDEN.get(module, ()))
    there = {
        name
        for name, value in vars(importlib.import_module(module)).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("jaxdist")
    }
    # What a module imports for itself, without `as`, is no name of it.
    own = {name for name in there if name in _read_exported(module)}
    assert own <= listed | hidden
    assert not hidden & listed
    assert all(hasattr(importlib.import_module(module), name) for name in listed)


def _read_exported(module: str) -> set[str]:
    file = importlib.import_module(module).__file__
    assert file is not None
    text = pathlib.Path(file).read_text()
    exported = set(re.findall(r"\bas (\w+)", text)) | set(
        re.findall(r"^(?:def|class) (\w+)", text, re.M)
    )
    if "import *" in text:
        exported |= set(vars(importlib.import_module(module)))
    return exported


def test_each_object_has_one_entry_and_its_other_names_lead_to_it() -> None:
    names = api_pages.list_names()
    entries = {name.path for name in names if name.first == name.path}
    assert {name.first for name in names} == entries
    page = api_pages.write_page("jaxdist")
    assert "::: jaxdist.MirroredStrategy\n" in page
    assert "- `jaxdist.contrib.Strategy`" not in page
    contrib = api_pages.write_page("jaxdist.contrib")
    assert "- `jaxdist.contrib.get_strategy` is [`jaxdist.get_strategy`]" in contrib


def test_strategies_come_first_and_helpers_last() -> None:
    page, training, fit = (
        re.findall(r"^::: ([\w.]+)", api_pages.write_page(module), re.M)
        for module in ("jaxdist", "jaxdist.training", "jaxdist.fit")
    )
    assert page[0] == "jaxdist.Strategy"
    strategies = {path for path in page if path.endswith("Strategy")}
    assert set(page[: len(strategies)]) == strategies
    assert training[0] == "jaxdist.training.run_loop"
    helpers = {"EXTRAS", "require_extra", "WEIGHT"}
    assert {path.rpartition(".")[2] for path in training[-len(helpers) :]} == helpers
    assert fit.index("jaxdist.fit.Model") < min(
        fit.index(f"jaxdist.fit.{name}") for name in ("Callback", "EarlyStopping", "CSVLogger")
    )
    assert api_pages.list_modules()[0] == "jaxdist"


@pytest.mark.parametrize("module", api_order.FIRST)
def test_a_name_that_comes_first_has_an_entry_of_its_own(module: str) -> None:
    own = {n.name for n in api_pages.list_names() if n.module == module and n.first == n.path}
    first = api_order.FIRST[module]
    assert set(first) <= own
    assert len(set(first)) == len(first)


def test_modules_that_come_first_exist() -> None:
    assert set(api_order.MODULES) <= set(api_pages.list_modules())


def _list_members(owner: str) -> set[str]:
    """Names of a module; methods and fields of a class, also those that `__init__` sets."""
    if owner in api_pages.list_modules():
        return set(dir(importlib.import_module(owner)))
    module, _, name = owner.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    fields = re.findall(r"self\.(\w+)", inspect.getsource(kind))
    return {*fields, *kind.__annotations__, *(one for base in kind.__mro__ for one in vars(base))}


@pytest.mark.parametrize("owner", api_order.HIDDEN)
def test_what_the_api_reference_hides_exists(owner: str) -> None:
    hidden = api_order.HIDDEN[owner]
    assert set(hidden) <= _list_members(owner)
    if owner not in api_pages.list_modules():
        entries = api_pages.write_page(owner.rpartition(".")[0]).split("::: ")
        (entry,) = [one for one in entries if one.startswith(f"{owner}\n")]
        assert all(f'"!^{one}$"' in entry for one in hidden)


def test_no_page_uses_a_hidden_name_of_a_module() -> None:
    texts = [page.read_text() for page in PAGES if "design" not in page.parts]
    names = [
        f"{module.removeprefix('jaxdist.')}.{name}"
        for module in set(api_order.HIDDEN) & set(api_pages.list_modules())
        for name in api_order.HIDDEN[module]
    ]
    assert [name for name in names if any(name in text for text in texts)] == []


@pytest.mark.parametrize(
    "place", [p for p in documentation_site.generate_pages() if p.startswith("notebooks/")]
)
def test_lines_of_the_page_of_a_notebook_fit_into_80_columns(place: str) -> None:
    blocks = read_blocks(documentation_site.generate_pages()[place])
    code = [line for block in blocks if block.language == "python" for line in block.lines]
    outputs = [line for block in blocks if block.language == "text" for line in block.lines]
    assert [line for line in code if len(line) > COLUMNS] == []
    # Reports in cells have tables of up to 100 columns, which scroll.
    wide = [line for line in outputs if len(line) > COLUMNS]
    assert [line for line in wide if "  " not in line.strip() or len(line) > 100] == []


def _read_navigation() -> list[str]:
    lines = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r"- ([\w/.-]+\.md)$", lines, re.M)


def test_the_navigation_has_each_page_once() -> None:
    listed = _read_navigation()
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_list_of_pages_has_the_order_of_the_navigation() -> None:
    # Above it are the first example and the pages for people who come from elsewhere.
    index = (DOCS / "index.md").read_text().partition("\n## Start\n")[2]
    pages = [p for p in _read_navigation() if not p.startswith("design/") and p != "index.md"]
    found = [link for link in re.findall(r"\]\(([\w/.-]+\.md)\)", index) if link in pages]
    assert list(dict.fromkeys(found)) == pages


def test_a_folder_of_pages_is_not_too_long_to_read() -> None:
    folders = [DOCS, *(path for path in DOCS.iterdir() if path.is_dir())]
    # Design notes are numbered, and never renamed: none can move to another folder.
    most = {folder.name: 24 if folder.name == "design" else 18 for folder in folders}
    assert {
        f.name: len(list(f.iterdir())) for f in folders if len(list(f.iterdir())) > most[f.name]
    } == {}


def test_links_out_of_the_pages_lead_to_pages_of_the_site() -> None:
    folder = DOCS / "how-to"
    text = "[a](../../notebooks/quick_start.ipynb) [b](plan.md#c) [d](https://e.f) [g][h]"
    moved = documentation_site.move_links(text, folder, "how-to/x.md")
    assert moved == "[a](../notebooks/quick_start.md) [b](plan.md#c) [d](https://e.f) [g][h]"
    places = documentation_site.generate_pages()
    assert {"changelog.md", "notebooks/quick_start.md", "reference/api/jaxdist.md"} <= set(places)


def test_a_page_of_a_notebook_shows_what_its_cells_print_and_draw() -> None:
    pictures = documentation_site.generate_pictures()
    text = documentation_site.generate_pages()["notebooks/porting.md"]
    shown = re.findall(r"!\[Output of the cell\]\((.+\.png)\)", text)
    assert [f"notebooks/{name}" for name in shown] == [n for n in pictures if "porting" in n]
    assert shown
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())
    assert "```text\nold_tf.py:4:12: JD006" in text


@pytest.mark.parametrize(
    ("place", "meta"),
    [("design/001-engine.md", {"search": {"exclude": True}}), ("how-to/fit.md", {})],
)
def test_only_design_notes_are_left_out_of_the_search(place: str, meta: dict[str, Any]) -> None:
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=place), meta={})
    documentation_site.on_page_markdown("text", page)
    assert page.meta == meta


def test_a_section_of_errors_with_a_sentence_is_not_read_as_classes() -> None:
    pytest.importorskip("griffe", reason="the extra `docs` is not installed")
    rename = importlib.import_module("tools.docstring_sections").rename_sections
    raises = "Run.\n\nRaises:\n    KeyError: There is none;\n        or two.\n"
    example = "\nExample:\n    >>> 1\n    1\n"
    assert rename(raises + example) == raises + example.replace("Example", "Examples")
    sentence = "    Everything that the step raises.\n"
    assert rename(raises + sentence) == (raises + sentence).replace("Raises", "Errors")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_site_is_built_without_a_warning(tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or not importlib.util.find_spec("mkdocstrings"):
        pytest.skip("the extra `docs` is not installed")
    # With --quiet, --strict would not see warnings.
    command = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "reference" / "api" / "jaxdist.html").read_text()
    assert 'id="jaxdist.MirroredStrategy"' in page
    # Sections that griffe does not know are shown with their names, and examples as code.
    assert "<summary>Cost</summary>" in page
    assert "&gt;&gt;&gt; " in page
    assert 'id="jaxdist.Variable.assign"' in page
    assert 'id="jaxdist.Variable.one_copy"' not in page
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert "quick-start.html" in found
    assert not [place for place in found if place.startswith("design/")]
