"""`docs/troubleshooting.md` quotes messages as they are raised."""

import ast
import builtins
import doctest
import functools

import jax
import pytest

import jaxdist
from tests.documentation.mistakes import MISTAKES, provoke
from tests.test_documentation import ROOT, read_blocks

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = [" ".join(block.lines) for block in read_blocks(PAGE.read_text())]
# What stands between the parts of a literal that are known before the program runs.
GAP = "\x00"


def _fits(quoted: str, raised: str) -> bool:
    return doctest.OutputChecker().check_output(quoted, raised, doctest.ELLIPSIS)


@functools.cache
def _read_literals() -> list[str]:
    """Every text in the source of the package, with a gap for each formatted value."""
    found = []
    for file in (ROOT / "jaxdist").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else GAP for v in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def _find_class(name: str) -> type[Exception]:
    for module in (jaxdist.errors, jax.errors, builtins):
        if hasattr(module, name):
            return getattr(module, name)
    raise AssertionError(f"there is no error {name}")


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    strategy = jaxdist.MirroredStrategy(jax.devices("cpu")[:4])
    return {name: provoke(name, strategy, tmp_path_factory.mktemp("run")) for name in MISTAKES}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_of_a_mistake_is_quoted_once(name: str, raised: dict[str, str]) -> None:
    assert len([one for one in QUOTED if _fits(one, raised[name])]) == 1, raised[name]


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda quoted: quoted[:40])
def test_a_quoted_message_is_raised_or_its_words_are_in_the_source(
    quoted: str, raised: dict[str, str]
) -> None:
    name, _, message = quoted.partition(": ")
    assert issubclass(_find_class(name), Exception)
    if not any(_fits(quoted, one) for one in raised.values()):
        parts = [part.strip(" :,.") for part in message.split("...") if part.strip(" :,.")]
        assert parts != []
        missing = [p for p in parts if not any(p in literal for literal in _read_literals())]
        assert missing == []


def test_most_quoted_messages_are_raised_here(raised: dict[str, str]) -> None:
    found = [quoted for quoted in QUOTED if any(_fits(quoted, one) for one in raised.values())]
    assert len(found) >= len(QUOTED) - 11


def test_words_that_no_message_has_are_found() -> None:
    assert not any("the replicas quarrel" in literal for literal in _read_literals())
    assert not _fits("NoRowsError: a mean over ... rows", "NoRowsError: a sum over no rows")


def test_each_entry_says_why_and_what_to_do() -> None:
    entries = PAGE.read_text().split("\n### ")[1:]
    assert len(entries) == len(QUOTED)
    for entry in entries:
        assert "**Why.**" in entry, entry[:40]
        assert "**What to do.**" in entry, entry[:40]
