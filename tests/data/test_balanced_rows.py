"""`InputOptions(balance_rows=True)`: replicas differ by one row at most, as in `np.array_split`."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import PerReplica
from jaxdist.data import (
    InputOptions,
    PartialBatch,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
)
from jaxdist.errors import ArgumentError, ArgumentTypeError, NoRowsError
from tests.layouts import make_layout
from tests.tables import examples

UNEVEN = InputOptions(balance_rows=True)
PAD = UNEVEN._replace(partial_batch=PartialBatch.PAD)


def _parts(value: Any) -> list[np.ndarray]:
    return [np.asarray(v) for v in (value.values if isinstance(value, PerReplica) else [value])]


@settings(max_examples=examples(40), deadline=None)
@given(
    count=st.integers(1, 8), num=st.integers(1, 60), size=st.integers(1, 40), ahead=st.booleans(),
    on_device=st.booleans(), fetch=st.booleans(),
)  # fmt: skip
def test_rows_are_divided_as_numpy_divides_them(
    count: int, num: int, size: int, ahead: bool, on_device: bool, fetch: bool
) -> None:
    x = np.arange(1, num + 1)
    whole: Any = batches(x, size) if ahead else list(batches(x, size))
    whole = [jax.numpy.asarray(b) for b in whole] if on_device else whole
    options = UNEVEN._replace(experimental_fetch_to_device=fetch)
    found = [_parts(b) for b in distribute_dataset(whole, make_layout(count), options)]
    wanted = [np.array_split(b, count) for b in batches(x, size)]
    assert [[p.tolist() for p in b] for b in found] == [[p.tolist() for p in b] for b in wanted]
    rows = -(-min(size, num) // count)
    pad = PAD._replace(experimental_fetch_to_device=fetch)
    for (batch, mask), parts in zip(
        distribute_dataset(whole, make_layout(count), pad), wanted, strict=True
    ):
        for value, real, part in zip(_parts(batch), _parts(mask), parts, strict=True):
            assert value.tolist() == [*part.tolist(), *[0] * (rows - len(part))]
            assert real.tolist() == [i < len(part) for i in range(rows)]


def test_the_division_of_tensorflow_stays_the_default() -> None:
    assert InputOptions().balance_rows is False
    (batch,) = distribute_dataset([np.arange(28)], make_layout(8))
    assert [len(v) for v in batch.values] == [4, 4, 4, 4, 4, 4, 4, 0]
    (batch,) = distribute_dataset([np.arange(28)], make_layout(8), UNEVEN)
    assert [len(v) for v in batch.values] == [4, 4, 4, 4, 3, 3, 3, 3]


def test_the_error_for_a_mean_over_no_rows_names_the_option_where_it_leaves_nobody_without() -> (
    None
):
    strategy = jaxdist.MirroredStrategy(jax.devices()[:8])

    def step(x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("mean", x.mean())

    def run(rows: int, options: InputOptions) -> Any:
        x = np.ones(rows, np.float32)
        (batch,) = strategy.experimental_distribute_dataset([x], options)
        return strategy.run(step, (batch,))

    with pytest.raises(
        NoRowsError, match=r"InputOptions\(balance_rows=True\)[^.]*4, 4, 4, 4, 3, 3"
    ):
        run(28, InputOptions())
    with pytest.warns(jaxdist.errors.UnevenMeanWarning):
        assert float(run(28, UNEVEN)) == 1
    with pytest.raises(NoRowsError) as error:
        run(7, UNEVEN)
    assert "balance_rows" not in str(error.value)


def test_the_option_is_a_flag_and_for_global_batches_only() -> None:
    with pytest.raises(ArgumentTypeError, match="balance_rows"):
        InputOptions(balance_rows=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="balance_rows=True"):
        distribute_datasets_from_function(lambda _: [np.ones(2)], make_layout(2), UNEVEN)
