"""A `DataLoader` of PyTorch trains as its arrays do; what jaxdist cannot take is refused."""

import importlib
from typing import Any

import numpy as np
import pytest

from jaxdist.errors import ArgumentError, ArgumentTypeError
from tests.tools.programs import SIZE, X, Y, check_fit, read_step

torch: Any = importlib.import_module("torch")
data: Any = importlib.import_module("torch.utils.data")


def _load(*tensors: Any, **given: Any) -> Any:
    return data.DataLoader(data.TensorDataset(*tensors), SIZE, **given)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_trains_as_its_arrays(workers: int) -> None:
    given: dict[str, Any] = {}
    if workers:
        given = {"num_workers": workers, "multiprocessing_context": "forkserver"}
    check_fit(_load(torch.from_numpy(X), torch.from_numpy(Y), **given))


def test_tensors_train_as_their_arrays() -> None:
    check_fit(torch.from_numpy(X), torch.from_numpy(Y), batch_size=SIZE, shuffle=False)


def test_a_batch_of_a_dict_has_its_keys_and_dtypes() -> None:
    images = torch.from_numpy(X).bfloat16()
    rows = [{"image": images[i], "label": int(Y[i])} for i in range(len(Y))]
    batch = read_step(data.DataLoader(rows, SIZE))
    assert {key: str(value.values[0].dtype) for key, value in batch.items()} == {
        "image": "bfloat16",
        "label": "int32",
    }
    labels = np.concatenate([np.asarray(value) for value in batch["label"].values])
    np.testing.assert_array_equal(labels, Y[:SIZE])


def test_integers_that_do_not_fit_are_refused() -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=r"64"):
        read_step(_load(torch.tensor([2**40] * SIZE)))


def test_a_tensor_that_requires_gradients_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"batch\[0\] is a Tensor"):
        read_step(_load(torch.from_numpy(X).requires_grad_()))
