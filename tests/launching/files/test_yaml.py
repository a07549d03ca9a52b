"""YAML that is written is read back as it was."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jaxdist._launching.files.request import write_yaml

_TEXTS = st.one_of(
    st.text(),
    st.lists(st.text("ab \t#:-'\"\\{}[]|>&*!%@`$\r"), max_size=5).map("\n".join),
    st.sampled_from(["yes", "null", "~", "1", "1e3", "0x1", "on", "-", "", "a: b", "#"]),
    st.sampled_from(["2024-01-01", "\u0085", "\u2028", "\ufeff", "😀\n😀\n", "  a\n b\n", "1:2"]),
)
_VALUES = st.recursive(
    st.one_of(_TEXTS, st.integers(), st.booleans(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(_VALUES)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert yaml.safe_load(write_yaml(value)) == value


@pytest.mark.parametrize("text", ["#!/bin/sh\nls\n", "  first\nsecond", "a\n\n"])
def test_texts_of_several_lines_are_blocks(text: str) -> None:
    written = write_yaml({"key": {"run": text}})
    assert "run: |2" in written
    assert yaml.safe_load(written) == {"key": {"run": text}}
