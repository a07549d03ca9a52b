"""Each rule finds what it is for, in its line, and leaves near misses alone."""

import re

import pytest

from jaxdist.cli import main
from tests.lint.command import lint_text
from tests.lint.programs import FOUND, NOT_FOUND


def _lint(text: str) -> list[tuple[int, str]]:
    return [(f.line, f.code) for f in lint_text(text)]


def _marked(text: str) -> list[tuple[int, str]]:
    """The lines that end with `# JD001 JD002`, and these codes."""
    lines = enumerate(text.splitlines(), 1)
    marks = ((number, re.search(r"#((?: JD\d+)+)$", line)) for number, line in lines)
    return [(number, code) for number, mark in marks if mark for code in mark[1].split()]


@pytest.mark.parametrize(
    ("code", "name"), [(code, name) for code, programs in FOUND.items() for name in programs]
)
def test_a_rule_finds_what_it_is_for_in_its_line(code: str, name: str) -> None:
    text = FOUND[code][name]
    assert code in {found for _, found in _marked(text)}
    assert _lint(text) == _marked(text)


@pytest.mark.parametrize(
    ("code", "name"), [(code, name) for code, programs in NOT_FOUND.items() for name in programs]
)
def test_a_near_miss_is_left_alone(code: str, name: str) -> None:
    assert _lint(NOT_FOUND[code][name]) == []


def test_every_rule_has_programs_that_it_finds_something_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["lint", "--help"])
    rules = re.findall(r"^ +(JD\d+) (\S+)", capsys.readouterr().out, re.M)
    codes = {code for code, _ in rules}
    assert {"JD006", *FOUND} == codes == {"JD006", *NOT_FOUND}
    assert len({name for _, name in rules}) == len(rules) == len(codes)


def test_a_comment_switches_a_rule_off_in_its_line() -> None:
    text = "import jax\nstep = jax.pmap(f)  # jaxdist: ignore[{}]\nother = jax.pmap(g)\n"
    assert _lint(text.format("JD004")) == [(3, "JD004")]
    assert _lint(text.format("JD001, JD004")) == [(3, "JD004")]
    assert _lint(text.format("JD001")) == [(2, "JD004"), (3, "JD004")]
    assert _lint(text.replace("[{}]", "")) == [(3, "JD004")]
    in_text = "import jax\nstep = jax.pmap(f), '# jaxdist: ignore'\n"
    assert _lint(in_text) == [(2, "JD004")]


def test_functions_that_call_each_other_come_to_an_end() -> None:
    head = "import jaxdist\n"
    circle = "def a(x):\n    return b(x)\ndef b(x):\n    return a(x)\na(1)\n"
    many = "".join(f"def f{n}(x):\n    return f{n + 1}(f{n + 1}(x))\n" for n in range(40))
    assert _lint(f"{head}{circle}{many}f0(1)\n") == []


def test_all_of_the_grammar_is_read() -> None:
    """What no rule is about must not end the command."""
    text = """
import jax
from . import sibling
async def main(a, /, b=1, *rest, c, **others):
    async with a as (x, *y), b: pass
    async for x, y in a: await x
    else: pass
    match a:
        case {"x": [1, *z]} if z: return [i async for i in a if i]
        case _: raise ValueError from None
    try: del a.b, a[0]
    except* (KeyError, ValueError) as error: pass
    x: int
    x: int = (y := 3)
    a.b[0].c += 1
    a[0], *a.b = f"{x!r:{y}}", *y
    while x: break
    return {**a, "k": {*y}, 1: lambda *p, q=0: (yield)}, x < y < 3, not x, a[1:2, ...]
class A(B, metaclass=C):
    x: int = 1
    @property
    def y(self): return self.x
    @jax.jit
    def z(): return super().y
with open("x"): pass
for i in range(3): continue
"""
    assert _lint(text) == []
