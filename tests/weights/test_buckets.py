"""Weights in buckets: complete or absent, and a slice is read by its bytes."""

import functools
import uuid
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from jaxdist import training
from jaxdist._buckets import path as path_module
from jaxdist.errors import ArgumentError, BucketError, CheckpointError
from tests.checkpoints.buckets.stores import BUCKET, SCHEMES, Proxy, use_store

MODEL = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.int8)}


def _zeros() -> dict[str, np.ndarray]:
    return {name: np.zeros_like(x) for name, x in MODEL.items()}


@functools.cache
def _make_context() -> Any:
    retries = {"max_retries": 4, "initial_delay": "1ms", "max_delay": "2ms"}
    context = {f"{d}_request_retries": retries for d in ("gcs", "s3")}
    return tensorstore.Context({**context, **path_module.OCDBT_CACHE})


@pytest.fixture(params=SCHEMES)
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = use_store(request.param, monkeypatch)
    monkeypatch.setattr(path_module, "make_context", _make_context)
    path_module._open.cache_clear()
    yield proxy
    path_module._open.cache_clear()


@pytest.fixture
def url(store: Proxy) -> str:
    return f"{store.scheme}://{BUCKET}/{uuid.uuid4().hex}"


@pytest.mark.parametrize("name", ["x.safetensors", "folder"])
def test_weights_go_into_a_bucket_and_back(url: str, name: str) -> None:
    training.export_weights(MODEL, f"{url}/{name}", max_shard_size=8)
    mesh = jax.make_mesh((2,), ("x",))
    rows = jax.NamedSharding(mesh, jax.P("x"))
    empty = {"a": jax.device_put(jnp.zeros((2, 3)), rows), "b": np.zeros(4, np.int8)}
    found = training.load_weights(empty, f"{url}/{name}")
    assert found["a"].sharding == rows
    for key, value in MODEL.items():
        np.testing.assert_array_equal(found[key], value)


def test_a_slice_in_a_bucket_is_read_by_its_bytes(url: str, store: Proxy) -> None:
    whole = np.arange(1 << 22, dtype=np.float32).reshape(8, -1)
    training.export_weights({"x": whole}, f"{url}/x.safetensors")
    store.reset()
    mapping = {"x": training.Weight("x")[2:4, 7:]}
    empty = {"x": np.zeros((2, whole.shape[1] - 7), np.float32)}
    found = training.load_weights(empty, f"{url}/x.safetensors", mapping)
    np.testing.assert_array_equal(found["x"], whole[2:4, 7:])
    # The header, its length, whether the object ends where it has to, and the rows.
    reads = [request for request in store.requests if request[0] == "GET"]
    assert len(reads) <= 6, store.requests


@pytest.mark.parametrize("status", [0, 503])
@pytest.mark.parametrize("name", ["x.safetensors", "folder"])
def test_an_export_that_stops_at_any_request_leaves_old_new_or_no_weights(
    url: str, store: Proxy, name: str, status: int
) -> None:
    kinds = set()
    for stop in range(40):
        target = f"{url}/{stop}/{name}"
        store.reset()
        training.export_weights(MODEL, target, max_shard_size=8)
        store.reset()
        store.fail = lambda number, method, key, stop=stop: status if number >= stop else None
        new = {key: x + 1 for key, x in MODEL.items()}
        try:
            training.export_weights(new, target, max_shard_size=8)
        except BucketError:
            pass
        else:
            break
        finally:
            store.reset()
        try:
            found = training.load_weights(_zeros(), target)
        except CheckpointError as error:
            kinds.add("none" if "has no weights" in str(error) else str(error))
            continue
        more = {int(np.unique(found[key] - x).item()) for key, x in MODEL.items()}
        assert len(more) == 1, "torn"
        kinds |= more
    else:
        pytest.fail("the export has more than 40 requests")
    assert kinds <= {"none", 0, 1}
    assert stop >= 1


def test_a_store_that_fails_now_and_then_is_asked_again(url: str, store: Proxy) -> None:
    store.fail = lambda number, method, key: 503 if number % 3 == 0 else None
    training.export_weights(MODEL, url, max_shard_size=8)
    found = training.load_weights(_zeros(), url)
    assert all(np.array_equal(found[key], x) for key, x in MODEL.items())


def test_a_bucket_without_permission_or_weights_is_named(url: str, store: Proxy) -> None:
    with pytest.raises(CheckpointError, match="which has no weights"):
        training.load_weights(_zeros(), url)
    store.fail = lambda number, method, key: 403
    with pytest.raises(BucketError, match=f"^{url}"):
        training.export_weights(MODEL, f"{url}/x.safetensors")
    with pytest.raises(BucketError, match=f"^{url}"):
        training.load_weights(_zeros(), f"{url}/x.safetensors")


def test_an_object_that_is_cut_is_named(url: str) -> None:
    training.export_weights(MODEL, f"{url}/x.safetensors")
    scheme, _, key = url.partition(f"://{BUCKET}/")
    file = path_module.BucketPath(scheme, BUCKET, f"{key}/x.safetensors")
    whole = file.read_bytes()
    for size in (1, 4, 20, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            training.load_weights(_zeros(), f"{url}/x.safetensors")


def test_another_scheme_is_refused() -> None:
    for call in (
        lambda: training.export_weights(MODEL, "hdfs://a/b"),
        lambda: training.load_weights(MODEL, "hdfs://a/b"),
        lambda: training.export_weights(MODEL, "x.safetensors", like="hdfs://a/b"),
    ):
        with pytest.raises(ArgumentError, match="hdfs"):
            call()
