"""Pages are free of phrases that no native writer would use; each has a plain replacement.

Code, inline code and quoted messages are left out, since they quote programs.
"""

import pathlib
import re

import pytest

from tests.test_documentation import PAGES, ROOT

# The changelog quotes; the other files in capitals are for contributors.
WRITTEN = [p for p in PAGES if p.parent != ROOT or p.name == "README.md"]

# What a page says, and what to write instead.
PHRASES: dict[str, tuple[str, str]] = {
    "is none": (r"(?<![Tt]here )\b(?:is|are|was|were) none\b(?! of\b)", "is not valid"),
    "is no X": (
        r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|matter\b)\w+",
        "is not an X",
    ),
    "told": (r"\b(?:told|said)\b", "name who reports it"),
    "asked": (r"\basked\b", "requested"),
    "of which each": (r"\bof (?:which|whom) (?:a|all|each|every|one|only)\b", "each X has its own"),
    "is there": (
        r"\b(?:is|are|was|were) there(?= (?:afterwards|already|then|too)\b|[.,;:)]|$)",
        "exists",
    ),
    "has it not": (r"\b(?:has|have|does|do|is|are) (?:it|they|he|she) not\b", "does not have"),
    "texts": (r"\btexts\b|\b(?:a bool|a number|empty|an? integer),? (?:or )?an? text\b", "strings"),
    "in the place of": (r"\bin (?:the )?place of\b", "instead of"),
    "goes on": (r"\b(?:go|goes|going|gone|went) on\b", "continues"),
    "come again": (r"\b(?:come|comes|came) again\b", "repeats"),
    "What ...": (r"(?m)(?:^(?:[-*>] |\d+\. )?|(?<=[.:;] ))What\b(?![^.\n]*\?)", "name the thing"),
}


def read_prose(text: str) -> str:
    """The sentences of a page: blocks are empty lines, code and quotations are `x`."""
    text = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`", "`x`", text)
    # Headings that begin with What are titles of what follows.
    return re.sub(r'"[^"\n]*"', '"x"', re.sub(r"^#+ What\b", "# x", text, flags=re.M))


def find_phrases(text: str) -> list[str]:
    """Each phrase in a page, with its line and what to write instead."""
    prose = read_prose(text)
    return [
        f"line {prose[: found.start()].count(chr(10)) + 1}: {found[0]!r}; write {instead!r}"
        for pattern, instead in PHRASES.values()
        for found in re.finditer(pattern, prose, re.MULTILINE)
    ]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_phrase_that_a_native_writer_would_not_use(page: pathlib.Path) -> None:
    assert find_phrases(page.read_text()) == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("is none", "The mean of integers is none."),
        ("is no X", "Pass values that are no examples."),
        ("is no X", "A `Variable` is no argument."),
        ("told", "The number of devices as told by Slurm."),
        ("asked", "What was asked for"),
        ("of which each", "An all-reduce of which each device keeps a slice."),
        ("is there", "No GPU was there."),
        ("is there", "What it assigns is there afterwards."),
        ("has it not", "If the key has it not, it fails."),
        ("texts", "Numbers, texts and arrays."),
        ("texts", "A bool, a number or a text."),
        ("in the place of", "Install the wheel in place of the folder."),
        ("goes on", "The job goes on with fewer processes."),
        ("come again", "These rows come again."),
        ("What ...", "What a replica adds is computed from zero."),
        ("What ...", "- What the class defines: a task."),
    ],
)
def test_a_planted_phrase_is_found(name: str, sentence: str) -> None:
    assert re.search(PHRASES[name][0], sentence, re.MULTILINE)
    assert len(find_phrases(sentence)) >= 1


@pytest.mark.parametrize(
    "sentence",
    [
        "If there is none, the array is padded.",
        "There is no graph, and it is no longer needed.",
        "What is a replica? It is a copy.",
        "## What a step communicates",
        "Is there a way? Is it there that it fails?",
        "The predicted text of a model, and a text file.",
        "The error names what was called.",
        'The table "Asked for" lists `is none`.',
        "```text\nNothing is none, and the job goes on.\n```",
        "None of them is needed, and no example is dropped.",
        "The value takes the place of the other.",
        "It is used from the next dispatch on.",
    ],
)
def test_plain_english_is_not_a_finding(sentence: str) -> None:
    assert find_phrases(sentence) == []
