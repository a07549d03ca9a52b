"""The rows: all are listed, the counted ones hold, and figures are judged as they should be."""

import json
import pathlib
import re

import pytest

import benchmarks
import jaxdist
from benchmarks import table_collectives
from benchmarks.__main__ import main
from benchmarks._bench import Race
from benchmarks._lines import CountLine, Need
from benchmarks._rows import MODULES, ROWS
from jaxdist.errors import ArgumentError
from tests.tables import sampled

FOLDER = pathlib.Path(benchmarks.__file__).parent
COUNTED = """
    6 8 9 10 11 12 13 14 20 21 24 28 cache servers strangers tasks transport variables
""".split()
ONLY_TIMED = "first"
# Rows that say which links they have measured.
FITTED = {
    "12": "fitted cpu-threads, 8 devices: alpha",
    "14": "fitted cpu-processes, 2 devices: alpha",
}


def test_every_row_file_is_listed_and_states_its_claim():
    listed = {m.__name__.rpartition(".")[2] for m in MODULES}
    assert listed == {p.stem for p in FOLDER.glob("row_*.py")}
    for module in MODULES:
        number = module.__name__.split("row_")[1].split("_")[0].lstrip("0")
        assert module.ROW == number
        assert "Claim:" in (module.__doc__ or "")
    assert len(ROWS) == len(MODULES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", sampled([*COUNTED, ONLY_TIMED], 6))
def test_smoke_run_meets_every_count(row, tmp_path, capsys):
    file = tmp_path / "figures.json"
    code = main(["--smoke", "--rows", row, "--json", str(file)])
    printed = capsys.readouterr()
    lines = json.loads(file.read_text())["lines"]
    counts = [line for line in lines if line.get("gates")]
    notes = [line["note"] for line in lines if "note" in line]
    assert {line["row"] for line in lines} == {row}
    assert row not in FITTED or any(note.startswith(FITTED[row]) for note in notes), notes
    assert bool(counts) == (row in COUNTED)
    assert [line for line in counts if not line["met"]] == [], printed
    assert code == 0


def test_tensorflow_row_without_tensorflow_is_skipped_and_says_so(monkeypatch, capsys):
    monkeypatch.delenv("JAXDIST_BENCH_TENSORFLOW", raising=False)
    assert main(["--smoke", "--rows", "3,4,20"]) == 0
    skipped = re.findall(r"row (3|4|20) skipped: .*--tensorflow PYTHON", capsys.readouterr().out)
    assert skipped == ["3", "4", "20"]


def test_table_of_collectives_has_every_algorithm_and_no_row_that_differs(tmp_path, capsys):
    file = tmp_path / "figures.json"
    code = main(["--smoke", "--table", "collectives", "--json", str(file)])
    printed = capsys.readouterr()
    lines = [line for line in json.loads(file.read_text())["lines"] if "found" in line]
    assert code == 0, printed
    on_cpu = [line["arm"] for line in lines if line["size"].startswith("cpu 6")]
    with pytest.raises(ArgumentError, match="The algorithms are") as caught:
        jaxdist.contrib.MultiWorkerAllReduce(["cpu:0"], 1, all_reduce_spec="none of them")
    names = re.findall("'([^']+)'", str(caught.value).split("\n\n")[1])
    assert on_cpu == [f"{name} x {shards}" for name in names for shards in (1, 2)]
    assert all(line["met"] for line in lines)


def test_table_with_a_row_that_differs_is_a_failure(monkeypatch, capsys):
    def wrong(*_: object) -> list[CountLine]:
        return [CountLine("collectives", "cpu 2", "nccl x 1", "formula", "none", "1 all-reduce")]

    monkeypatch.setattr(table_collectives, "run", wrong)
    assert main(["--smoke", "--table", "collectives"]) == 1
    assert "1 not met: rows collectives" in capsys.readouterr().out


def test_unknown_row_is_refused_with_those_that_exist(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--rows", "1,99"])
    assert stopped.value.code == 2
    assert "no row 99; there are 1, 2" in capsys.readouterr().err


def test_ratio_is_the_median_over_rounds_and_not_that_of_medians():
    wall = {"a": (1.0, 4.0, 9.0), "b": (1.0, 2.0, 10.0)}
    line = Race("1", "N=1", wall, wall, {}).line("a", "b", Need(1.0))
    assert line.ratio == 1.0
    assert line.ratios == (1.0, 2.0, 0.9)
    assert line.met is True


@pytest.mark.parametrize(
    ("need", "ratio", "more_us", "met"),
    [
        (Need(1.35, more_us=2), 1.3, 1.9, True),
        (Need(1.35, more_us=2), 1.3, 2.1, False),
        (Need(1.35, more_us=2), 1.4, 1.9, False),
        (Need(), 9.0, 9.0, None),
    ],
)
def test_need_is_met_by_ratio_and_by_microseconds(need, ratio, more_us, met):
    assert need.is_met(ratio, more_us) is met


def test_count_is_met_only_by_exactly_what_was_expected():
    assert CountLine("8", "", "", "", "all-reduce[7]", "all-reduce[7]").met
    assert not CountLine("8", "", "", "", "all-reduce[7] all-gather[1]", "all-reduce[7]").met
