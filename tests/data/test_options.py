"""`InputOptions`: documented defaults, and combinations that raise."""

from typing import Any

import numpy as np
import pytest

from jaxdist.data import (
    InputOptions,
    InputReplicationMode,
    PartialBatch,
    distribute_dataset,
    distribute_datasets_from_function,
)
from jaxdist.errors import ArgumentError, ArgumentTypeError
from tests.layouts import make_layout

PER_REPLICA = InputReplicationMode.PER_REPLICA


def test_options_have_the_documented_defaults() -> None:
    assert InputOptions()[:4] == (True, InputReplicationMode.PER_WORKER, False, 1)


def test_an_incomplete_batch_is_uneven_where_nothing_else_is_said() -> None:
    assert InputOptions().partial_batch is PartialBatch.UNEVEN
    assert [p.value for p in PartialBatch] == ["UNEVEN", "PAD", "DROP", "ERROR"]


@pytest.mark.parametrize("policy", ["PAD", None, True])
def test_an_unknown_policy_lists_the_valid_ones(policy: Any) -> None:
    with pytest.raises(ArgumentError, match=r"partial_batch[^$]*UNEVEN[^$]*PAD[^$]*DROP[^$]*ERROR"):
        InputOptions(partial_batch=policy)


def test_a_fetch_flag_of_none_becomes_true() -> None:
    assert InputOptions(experimental_fetch_to_device=None).experimental_fetch_to_device is True
    assert InputOptions(False).experimental_fetch_to_device is False


def test_options_are_a_named_tuple() -> None:
    options = InputOptions()._replace(experimental_per_replica_buffer_size=4)
    assert isinstance(options, InputOptions)
    assert options[3] == 4
    assert options._fields[3] == "experimental_per_replica_buffer_size"


def test_replication_modes_have_values_equal_to_their_names() -> None:
    assert [m.value for m in InputReplicationMode] == ["PER_WORKER", "PER_REPLICA"]


@pytest.mark.parametrize("size", [1.5, "2", True, None])
def test_a_buffer_size_that_is_no_int_is_refused(size: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="experimental_per_replica_buffer_size"):
        InputOptions(experimental_per_replica_buffer_size=size)


def test_an_unknown_replication_mode_lists_the_valid_ones() -> None:
    mode: Any = "PER_HOST"
    with pytest.raises(ArgumentError, match=r"'PER_HOST'[^$]*PER_WORKER[^$]*PER_REPLICA"):
        InputOptions(experimental_replication_mode=mode)


def test_a_flag_that_is_no_bool_is_refused() -> None:
    flag: Any = 1
    with pytest.raises(ArgumentTypeError, match="experimental_fetch_to_device"):
        InputOptions(experimental_fetch_to_device=flag)


def test_one_dataset_cannot_be_replicated_per_replica() -> None:
    layout = make_layout(2)
    options = InputOptions(experimental_replication_mode=PER_REPLICA)
    with pytest.raises(NotImplementedError, match="distribute_datasets_from_function"):
        distribute_dataset([np.zeros(2)], layout, options)


@pytest.mark.parametrize("distribute", [distribute_dataset, distribute_datasets_from_function])
def test_a_dataset_on_the_device_must_be_per_replica(distribute: Any) -> None:
    layout = make_layout(2)
    options = InputOptions(False, experimental_place_dataset_on_device=True)
    with pytest.raises(ArgumentError, match="Leave experimental_place_dataset_on_device out"):
        distribute(lambda *_: [np.zeros(2)], layout, options)


def test_a_dataset_on_the_device_must_not_be_fetched_to_it() -> None:
    layout = make_layout(2)
    options = InputOptions(True, PER_REPLICA, True)
    with pytest.raises(ArgumentError, match="experimental_fetch_to_device=False"):
        distribute_datasets_from_function(lambda _: [np.zeros(2)], layout, options)
