"""`InputContext` and `ValueContext`."""

import dataclasses

import pytest

from jaxdist.data import InputContext, ValueContext
from jaxdist.errors import ArgumentError


def test_input_context_without_arguments_is_one_pipeline_for_one_replica() -> None:
    context = InputContext()
    assert context.num_input_pipelines == 1
    assert context.input_pipeline_id == 0
    assert context.num_replicas_in_sync == 1


@pytest.mark.parametrize(
    ("batch", "replicas", "each"), [(8, 4, 2), (12, 6, 2), (0, 4, 0), (5, 1, 5)]
)
def test_per_replica_batch_size_is_the_equal_share(batch: int, replicas: int, each: int) -> None:
    context = InputContext(num_replicas_in_sync=replicas)
    assert context.get_per_replica_batch_size(batch) == each


def test_per_replica_batch_size_that_is_no_equal_share_names_the_sizes_that_are() -> None:
    with pytest.raises(ArgumentError, match=r"6 is not a multiple of 4[^$]*4 or 8") as caught:
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(6)
    assert isinstance(caught.value, ValueError)


def test_per_replica_batch_size_below_one_row_each_does_not_advise_zero_rows() -> None:
    with pytest.raises(ArgumentError, match=r"Use 4\."):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(3)


def test_input_context_reads_as_documented() -> None:
    assert str(InputContext(3, 1, 6)) == "jaxdist.InputContext(input pipeline id 1, total: 3)"


def test_input_context_refuses_unknown_attributes() -> None:
    with pytest.raises(AttributeError):
        InputContext().shard = 1  # type: ignore[attr-defined]


def test_input_context_properties_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        InputContext().input_pipeline_id = 1  # type: ignore[misc]


def test_value_context_reads_as_documented() -> None:
    expected = "jaxdist.ValueContext(replica id 0, total replicas in sync: 2)"
    assert str(ValueContext(0, 2)) == expected
    assert ValueContext() == ValueContext(0, 1)


def test_value_context_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ValueContext().num_replicas_in_sync = 2  # type: ignore[misc]
