"""What tests compare results with finds a number that is not one, in any leaf."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.nn.attention import distance
from tests.nn.experts_oracle import largest_error
from tests.nn.pipelines import largest_difference
from tests.pipeline.models import difference

COMPARISONS = (distance, largest_error, largest_difference, difference)


@pytest.mark.parametrize("leaf", ["a", "b", "c"])
@pytest.mark.parametrize("compare", COMPARISONS, ids=lambda fn: fn.__name__)
def test_nan_in_any_leaf_is_no_small_difference(
    compare: Callable[[Any, Any], float], leaf: str
) -> None:
    wanted = {name: np.ones((2, 3), np.float32) for name in "abc"}
    found = {name: x.copy() for name, x in wanted.items()}
    assert compare(found, wanted) == 0
    found[leaf][1, 1] = np.nan
    assert not compare(found, wanted) <= 1e6
