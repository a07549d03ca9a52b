"""The Chinese page of `tf.distribute.experimental.CollectiveHints`.

It has the statements of the English page, whose tests are in `test_collective_hints_page.py`. In
its examples the time is a float.
"""

import pytest

import jaxdist
from tests.seeds.hints import reduce_with_hints, train_with_hints

pytestmark = pytest.mark.filterwarnings("ignore:.*CollectiveHints is the older name")


def test_the_example_of_bytes_per_pack_trains_on_every_number_of_replicas() -> None:
    one = train_with_hints(jaxdist.OneDeviceStrategy("cpu:0"))
    for count in (2, 4):
        strategy = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(count)])
        for found, expected in zip(train_with_hints(strategy), one, strict=True):
            assert abs(found - expected).max() < 1e-5


def test_the_example_of_timeout_seconds_reduces_in_one_process() -> None:
    assert reduce_with_hints(120.0) == sum(range(8))


def test_the_newer_class_that_the_page_names_is_the_same_one() -> None:
    hints = jaxdist.experimental.CollectiveHints(1, 2.0)
    assert hints == jaxdist.experimental.CommunicationOptions(1, 2.0)
