"""`Addition`: something new in a copy of the package."""

import dataclasses
import pathlib
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Addition:
    """Something new in a copy of the package.

    Attributes:
        kind: What is added.
        new: The text of each new file, by its path below the package.
        edits: For each edited file, pairs of a text in it and the text that is inserted before it.
        program: A program that uses the addition.
        missing: How the program fails without the addition.
    """

    kind: str
    new: Mapping[str, str]
    edits: Mapping[str, tuple[tuple[str, str], ...]]
    program: str
    missing: str

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are new or edited."""
        return (*self.new, *self.edits)

    def apply(self, package: pathlib.Path) -> None:
        """Write the new files, and edit the others.

        Raises:
            ValueError: A place to insert a text is missing, or is there several times.
        """
        for path, text in self.new.items():
            file = package / path
            if file.exists():
                raise ValueError(f"{self.kind}: {path} exists.")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for path, pairs in self.edits.items():
            text = (package / path).read_text()
            for place, inserted in pairs:
                if text.count(place) != 1:
                    count = text.count(place)
                    raise ValueError(f"{self.kind}: {path} has {place!r} {count} times.")
                text = text.replace(place, inserted + place)
            (package / path).write_text(text)
