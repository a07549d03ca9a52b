"""fit, evaluate and predict on replicas equal Keras without jaxdist."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers

import jaxdist
from jaxdist.cluster_resolver import TPUClusterResolver
from tests.keras.models import CLASSES, FEATURES, check_equal, make_data, make_strategy, train


def make_sequential() -> Any:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def compile_classifier() -> dict[str, Any]:
    return {
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        "weighted_metrics": ["accuracy"],
    }


# The others belong to the long rows.
ORDINARY = [(1, 1, False), (7, 32, False), (7, 100, True), (100, 32, True)]
ROWS = [
    pytest.param(*row, marks=[] if row in ORDINARY else [pytest.mark.long])
    for row in itertools.product([1, 7, 100], [1, 32, 100], [False, True])
]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "batch_size", "weighted"), ROWS)
def test_any_number_of_examples_gives_the_numbers_of_keras_alone(
    size: int, batch_size: int, weighted: bool
) -> None:
    data = make_data(size, weighted=weighted)
    expected = train(None, make_sequential, compile_classifier, data, batch_size)
    for replicas in (1, 3, 8):
        found = train(
            make_strategy(replicas), make_sequential, compile_classifier, data, batch_size
        )
        check_equal(found, expected)


def test_an_uneven_last_batch_gives_the_numbers_of_keras_alone() -> None:
    data = make_data(13, weighted=True)
    expected = train(None, make_sequential, compile_classifier, data, 8)
    found = train(make_strategy(4), make_sequential, compile_classifier, data, 8)
    check_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "weighted"),
    [
        (32, True),
        *[pytest.param(100, w, marks=pytest.mark.long) for w in (False, True)],
        # 1,797 steps of an epoch take a minute for each number of replicas.
        pytest.param(1, True, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)  # fmt: skip
def test_all_rows_of_the_digits_data_set(batch_size: int, weighted: bool) -> None:
    data = make_data(1797, weighted=weighted)
    expected = train(None, make_sequential, compile_classifier, data, batch_size)
    for replicas in (1, 3, 8):
        strategy = make_strategy(replicas)
        found = train(strategy, make_sequential, compile_classifier, data, batch_size)
        check_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: jaxdist.experimental.CentralStorageStrategy(), 13),
        (lambda: jaxdist.TPUStrategy(TPUClusterResolver("virtual:v5e:2x4")), 13),
        # Virtual replicas take equal numbers of rows.
        (lambda: jaxdist.MirroredStrategy(deterministic=True), 16),
    ],
    ids=["central_storage", "tpu", "deterministic"],
)
def test_other_strategies_give_the_same_numbers(
    make: Callable[[], jaxdist.Strategy], size: int
) -> None:
    data = make_data(size)
    expected = train(None, make_sequential, compile_classifier, data, 8)
    check_equal(train(make(), make_sequential, compile_classifier, data, 8), expected)
