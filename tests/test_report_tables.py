"""Tables of reports wrap between words, and never within a number."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxdist._reports import Report, Table, as_text

_WORDS = st.text(st.characters(codec="ascii", categories=["L", "Nd"]), min_size=1, max_size=12)
_CELLS = st.lists(_WORDS, min_size=1, max_size=8).map(" ".join)


@st.composite
def _tables(draw: st.DrawFn) -> Table:
    count = draw(st.integers(1, 5))
    columns = tuple(f"c{i}" for i in range(count))
    rows = draw(st.lists(st.tuples(*[_CELLS] * count), min_size=1, max_size=4))
    numbers = frozenset(draw(st.sets(st.sampled_from(columns))))
    return Table("A title", columns, tuple(rows), numbers)


@given(_tables(), st.integers(20, 120))
def test_a_table_has_all_words_and_fits_where_each_of_them_does(table: Table, width: int) -> None:
    lines = list(table.lines(width))
    words = sorted(word for row in table.rows for cell in row for word in cell.split())
    found = sorted(" ".join(lines[1:]).split())
    for word in words:
        assert word in found
    is_narrow = all(len(c) <= width - 12 for row in table.rows for c in row)
    if is_narrow:
        assert max(map(len, lines)) <= width
    # Numbers are whole.
    for row in table.rows:
        for column, cell in zip(table.columns, row, strict=True):
            if column in table.numbers and is_narrow:
                assert any(cell in line for line in lines)


@given(_tables())
def test_without_a_width_each_row_is_one_line(table: Table) -> None:
    assert len(list(table.lines())) == 2 + len(table.rows)
    assert as_text([table]) == as_text([table], 10_000)


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_columns_of_numbers_stay_aligned(width: int) -> None:
    rows = (("a name of several words", "1,234,567"), ("short", "9"))
    lines = list(Table("T", ("what", "bytes"), rows, frozenset({"bytes"})).lines(width))
    ends = {len(line) for line in lines[1:] if re.search(r"\d$|bytes$", line)}
    assert len(ends) == 1


def test_titles_and_names_of_several_words_wrap_too() -> None:
    rows = (("a name of more words than a narrow screen has room for", "1,234,567,890 bytes"),)
    title = "Memory of a device while a step with a long name runs"
    table = Table(title, ("what", "bytes in all of it"), rows, frozenset({"bytes in all of it"}))
    assert list(table.lines(30)) == [
        "Memory of a device while a",
        "step with a long name runs",
        "  a name of more words than a",
        "  narrow screen has room for",
        "    bytes in all of it:",
        "      1,234,567,890 bytes",
    ]


def test_a_row_that_does_not_fit_becomes_few_lines_of_whole_cells() -> None:
    columns = ("", "rules", "replicas x logical", "a step", "peak", "what")
    reason = "12 heads are not divided by 16 devices, and 12 devices divide no slice."
    rows = (
        ("1", "fsdp_tensor_parallel", "64 x 2", "27.7 us", "9.37 MiB", "fits"),
        ("-", "tensor_parallel", "8 x 16", "", "", reason),
        ("-", "fsdp", "128 x 1", "", "9 GiB", "fits not"),
    )
    table = Table("Ranked", columns, rows, frozenset({"a step", "peak"}), frozenset({"rules"}))
    assert list(table.lines(60)) == [
        "Ranked",
        "  1",
        "    rules: fsdp_tensor_parallel  replicas x logical: 64 x 2",
        "    a step: 27.7 us  peak: 9.37 MiB  what: fits",
        "  -",
        "    rules: tensor_parallel  replicas x logical: 8 x 16",
        "    what: 12 heads are not divided by 16 devices, and 12",
        "      devices divide no slice.",
        "  -",
        "    rules: fsdp  replicas x logical: 128 x 1  peak: 9 GiB",
        "    what: fits not",
    ]


def test_a_coloured_cell_in_a_joined_line_keeps_its_colour() -> None:
    columns = ("a name that is long", "process", "replica", "chip")
    table = Table("T", columns, (("3" * 30, "3", "3", "3"),), coloured="replica", colours=(1,))
    [line] = [text for text in table.texts(40) if "replica" in text.plain]
    assert line.plain == "    process: 3  replica: 3  chip: 3"
    [span] = line.spans
    assert (span.start, span.end) == (25, 26)


class _Report(Report):
    def parts(self) -> list[Table | str]:
        rows = (("hidden.kernel", "[1024, 512]", "2,097,152"), ("out", "[3]", "12"))
        numbers, whole = frozenset({"bytes of a device"}), frozenset({"shape"})
        table = Table("Arrays", ("array", "shape", "bytes of a device"), rows, numbers, whole)
        return [table, "A sentence that is longer than a narrow screen.\n    Indented: a remedy."]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_print_and_rich_print_show_the_same(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    report, out = _Report(), io.StringIO()
    Console(file=out, width=width).print(report)
    assert out.getvalue().rstrip("\n") == str(report)
    assert max(map(len, str(report).splitlines())) <= width
    assert "[1024, 512]" in str(report)
    assert "\n    Indented: a remedy." in str(report)


def test_rich_does_not_cut_off_a_name_that_is_longer_than_the_screen() -> None:
    name, out = "file_" * 30, io.StringIO()
    table = Table("T", ("array", "bytes"), ((name, "12"),), frozenset({"bytes"}))

    class Long(Report):
        def parts(self) -> list[Table | str]:
            return [table, f"Profile: {name}"]

    Console(file=out, width=60).print(Long())
    assert out.getvalue().replace("\n", "").count(name) == 2
    assert max(map(len, out.getvalue().splitlines())) <= 60


def test_html_has_a_table_with_whole_numbers_sentences_and_aligned_lines() -> None:
    class Own(_Report):
        def parts(self) -> list[Table | str]:
            return [*super().parts(), "  Indented & <b>.", "0  1\n7  2"]

    shown = Own()._repr_html_()
    assert shown.count("2,097,152") == shown.count("[1024, 512]") == 1
    assert '<td style="text-align: right; white-space: nowrap">2,097,152</td>' in shown
    assert '<td style="text-align: left; white-space: nowrap">[1024, 512]</td>' in shown
    assert '<td style="text-align: left">hidden.kernel</td>' in shown
    assert re.search(r"<p [^>]*0.3em 1em[^>]*>Indented &amp; &lt;b&gt;\.</p>", shown)
    assert re.search("<pre [^>]*monospace; white-space: pre;[^>]*>0  1\n7  2</pre>", shown)


def test_a_pipe_gets_lines_that_do_not_wrap() -> None:
    assert str(_Report()) == _Report().text()
