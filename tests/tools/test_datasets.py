"""A dataset of Hugging Face trains as its arrays do, as a source of Grain and in a loop."""

import importlib
from collections.abc import Iterator
from typing import Any

from tests.tools.programs import SIZE, X, Y, check_fit

datasets: Any = importlib.import_module("datasets")
grain: Any = importlib.import_module("grain")
ROWS = datasets.Dataset.from_dict({"x": X, "y": Y}).with_format("numpy")


def test_a_source_of_grain_trains_as_its_arrays() -> None:
    source = grain.MapDataset.source(ROWS)
    check_fit(source.map(lambda row: (row["x"], row["y"])).batch(SIZE))


def test_a_loop_over_a_stream_trains_as_its_arrays() -> None:
    stream = ROWS.to_iterable_dataset().with_format("numpy")

    class Batches:
        def __iter__(self) -> Iterator[tuple[Any, Any]]:
            for batch in stream.iter(batch_size=SIZE):
                yield batch["x"], batch["y"]

    check_fit(Batches())
