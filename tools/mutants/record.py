"""Reads and writes `tests/records/mutants.tsv`, one line for each mutant."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

from tools.mutants.sample import Mutant

RESULTS = ("killed", "survived", "unreached")


@dataclasses.dataclass(frozen=True)
class Row:
    """What the tests found for one mutant."""

    function: str
    body: str
    file: str
    mutation: str
    # One of RESULTS.
    result: str
    # The test that killed it.
    test: str
    # How many tests were chosen, and how many reach the change: `30 of 112`.
    tests: str
    # The digest of the code and the commit that it was run with.
    code: str
    commit: str

    def is_of(self, mutant: Mutant) -> bool:
        """Return whether the row is of this mutant, in the same file with the same change."""
        own = (mutant.function, mutant.body, mutant.file, mutant.text)
        return own == (self.function, self.body, self.file, self.mutation)

    def has_change_of(self, other: "Row") -> bool:
        """Return whether the changes are the same, at any line."""
        return self.mutation.rpartition(" at ")[0] == other.mutation.rpartition(" at ")[0]


_COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


def read_rows(text: str) -> list[Row]:
    """Read the lines of a record."""
    if not text:
        return []
    head, *lines = text.split("\n")[:-1]
    if head.split("\t") != list(_COLUMNS):
        raise ValueError(f"The first line is {head!r}, and names other columns than {_COLUMNS}.")
    return [Row(*line.split("\t")) for line in lines]


def write_rows(rows: Iterable[Row]) -> str:
    """Write a record; its lines are sorted by function."""
    lines = sorted("\t".join(map(_clean, dataclasses.astuple(row))) for row in rows)
    return "".join(f"{line}\n" for line in ("\t".join(_COLUMNS), *lines))


def _clean(text: str) -> str:
    return text.replace("\t", " ").replace("\n", " ")


def load(file: pathlib.Path) -> list[Row]:
    """Read a file; a record that does not exist has no rows."""
    return read_rows(file.read_text()) if file.exists() else []


def save(file: pathlib.Path, rows: Iterable[Row]) -> None:
    """Write a file, complete or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.write_text(write_rows(rows))
    part.replace(file)


def find_row(mutant: Mutant, rows: Sequence[Row]) -> Row | None:
    """Find the row of a mutant's function, which may have moved or have another change now.

    Functions of one name are told apart by their bodies, then by their changes, then by their
    files.
    """
    own = [row for row in rows if row.function == mutant.function]
    for same in (
        lambda row: row.body == mutant.body and row.file == mutant.file,
        lambda row: row.body == mutant.body,
        lambda row: row.mutation == mutant.text,
        lambda row: row.file == mutant.file,
    ):
        found = [row for row in own if same(row)]
        if len(found) == 1:
            return found[0]
    return own[0] if len(own) == 1 else None


def pair(mutants: Sequence[Mutant], rows: Sequence[Row]) -> dict[int, Row]:
    """Find the row of each mutant, by its number; a row belongs to one mutant."""
    found: dict[int, Row] = {}
    free = list(rows)
    for mutant in mutants:
        exact = [row for row in free if row.is_of(mutant)]
        if exact:
            found[mutant.number] = exact[0]
            free.remove(exact[0])
    for mutant in mutants:
        row = None if mutant.number in found else find_row(mutant, free)
        if row is not None:
            found[mutant.number] = row
            free.remove(row)
    return found
