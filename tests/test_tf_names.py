"""Every public name of `tf.distribute` is there with its arguments, or says what replaces it."""

import ast
import inspect
import pathlib
import re
from typing import Any

import pytest

import jaxdist
from jaxdist import _not_there
from jaxdist.errors import MissingNameError
from tests import tf_names

_JOINED = re.sub(r"\n +", " ", tf_names.HERE).replace("( ", "(")
LINES = [line for line in _JOINED.splitlines() if line]
MISSING = tf_names.REPLACED


def _read(path: str) -> Any:
    """What the name stands for; of a class that a strategy is of, on an object of it."""
    found: Any = jaxdist
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _wanted(line: str) -> tuple[str, dict[str, str | None] | None]:
    """The name, and its arguments with their defaults as they are written."""
    if "(" not in line:
        return line, None
    name, _, rest = line.partition("(")
    arguments = ast.parse(f"def f({rest[:-1]}): pass").body[0].args  # type: ignore[attr-defined]
    names = [a.arg for a in arguments.args]
    defaults = [None] * (len(names) - len(arguments.defaults))
    written = [ast.unparse(d) for d in arguments.defaults]
    return name, dict(zip(names, [*defaults, *written], strict=True))


def _parameters(found: Any) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(found).parameters.values())
    return [p for p in parameters if p.name != "self"]


@pytest.mark.parametrize("line", LINES)
def test_a_documented_name_is_there_with_its_arguments_in_their_order(line: str) -> None:
    name, wanted = _wanted(line)
    found = _read(name)
    if wanted is None:
        return
    ours = _parameters(found)
    positional = [p for p in ours if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [p.name for p in positional][: len(wanted)] == list(wanted)
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in (p for p in ours[len(wanted) :] if p.kind not in collecting):
        assert parameter.default is not inspect.Parameter.empty, "more arguments have defaults"
    for parameter, default in zip(positional, wanted.values(), strict=False):
        if default is None:
            assert parameter.default is inspect.Parameter.empty
        elif default != "...":
            assert parameter.default == ast.literal_eval(default)


@pytest.mark.parametrize("name", MISSING)
def test_a_documented_name_that_is_not_there_says_what_is_in_its_place(name: str) -> None:
    owner, _, last = name.rpartition(".")
    place: Any = _read(owner) if owner else jaxdist
    if owner == "Strategy":
        place = jaxdist.MirroredStrategy(["cpu:0"])
    assert not hasattr(place, last)
    assert last not in dir(place)
    with pytest.raises(MissingNameError) as caught:
        getattr(place, last)
    assert isinstance(caught.value, AttributeError)
    assert f"{last} does not exist" in str(caught.value)
    assert MISSING[name] in str(caught.value)


def test_the_names_that_are_missing_are_exactly_the_listed_ones() -> None:
    found = {
        f"{module}.{name}".removeprefix("jaxdist.")
        for table in (_not_there.MISSING, {"Strategy": _not_there.MISSING_MEMBERS["Strategy"]})
        for module, names in table.items()
        for name in names
    }
    assert found == set(MISSING)


def test_no_name_is_both_there_and_missing() -> None:
    assert {_wanted(line)[0] for line in LINES} & set(MISSING) == set()


def test_a_name_that_nobody_documents_is_an_ordinary_attribute_error() -> None:
    for place in (jaxdist, jaxdist.contrib, jaxdist.errors, jaxdist.compat.v1.tpu):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'") as caught:
            _ = getattr(place, "nothing")  # noqa: B009
        assert not isinstance(caught.value, MissingNameError)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = getattr(jaxdist.get_strategy(), "nothing")  # noqa: B009


def test_an_import_of_a_missing_name_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="UpdateContext"):
        from jaxdist.contrib import UpdateContext  # type: ignore  # noqa: F401


PAGE = pathlib.Path(__file__).parent.parent / "docs" / "porting" / "coming-from-tf-distribute.md"


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of the page, row by row."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def _in_code(cell: str) -> list[str]:
    return re.findall(r"`([^`(]+)[^`]*`", cell)


def test_the_page_says_of_each_replaced_name_what_is_in_its_place() -> None:
    named = [
        name for row in _rows("Missing names and their replacements") for name in _in_code(row[0])
    ]
    assert sorted(set(named) - {"apply_gradients"}) == sorted(tf_names.REPLACED)


def test_the_page_names_what_is_there() -> None:
    text = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    words = set(re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"`([^`]+)`", text))))
    # Of classes: the table has a row for each, and what they have is documented by TensorFlow.
    tops = {_wanted(line)[0].removeprefix("compat.v1.") for line in LINES}
    tops = {name for name in tops if not re.match(r"(\w+\.)*[A-Z]\w*\.", name)}
    assert {name for name in tops if name.rpartition(".")[2] not in words} == set()


def test_what_has_other_arguments_stands_on_the_page() -> None:
    text = PAGE.read_text()
    for line, words in tf_names.OTHER_ARGUMENTS.items():
        name = _wanted(line)[0]
        assert _read(name)
        assert words in text
