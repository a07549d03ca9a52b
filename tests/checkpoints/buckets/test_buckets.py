"""Checkpoints in buckets: complete or absent, whatever the store or another job does."""

import contextlib
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxdist._buckets import BucketPath
from jaxdist._buckets.credentials import find_credentials
from jaxdist._checkpoints import bucket_lock, shards
from jaxdist._checkpoints.bucket_storage import BucketStorage
from jaxdist.errors import ArgumentError, BucketError, CheckpointError, DamagedCheckpointError
from jaxdist.training import Checkpoints
from tests import tables
from tests.checkpoints import bits
from tests.checkpoints.buckets.stores import BUCKET, SCHEMES, Proxy, be_impatient, use_store


@pytest.fixture(params=SCHEMES)
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    return use_store(request.param, monkeypatch)


@pytest.fixture(autouse=True)
def _impatient(store: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget = be_impatient(monkeypatch)
    yield
    forget()


@pytest.fixture
def url(store: Proxy, request: pytest.FixtureRequest) -> str:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return f"{store.scheme}://{BUCKET}/{name}"


def _get(url: str) -> BucketPath:
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return BucketPath(scheme, bucket, key)


def _list(url: str) -> list[str]:
    return _get(url).list_names()


def _make_state(value: float) -> dict[str, Any]:
    return {"w": jnp.full((4, 3), value), "b": np.full(3, value, np.float32)}


def _read(checkpoints: Checkpoints, **given: Any) -> tuple[int, float] | None:
    restored = checkpoints.restore(_make_state(0), **given)
    if restored is None:
        return None
    values = {float(x) for leaf in restored.state.values() for x in np.ravel(leaf)}
    assert len(values) == 1, "torn"
    return restored.step, values.pop()


_MIXED: dict[str, Callable[[], Any]] = {
    "float32": lambda: np.arange(12, dtype=np.float32).reshape(3, 4),
    "negative zeros": lambda: np.full((2, 2), -0.0, np.float32),
    "nan": lambda: np.array([np.nan, np.inf, -np.inf], np.float32),
    "number": lambda: np.float64(3.5),
    "integer": lambda: 7,
    "bfloat16": lambda: jnp.arange(5, dtype=jnp.bfloat16),
    "uint4": lambda: np.arange(16).astype(ml_dtypes.uint4),
    "float8": lambda: jnp.arange(4).astype(jnp.float8_e4m3fn),
    "bool": lambda: np.array([True, False]),
    "complex": lambda: np.array([1 + 2j], np.complex64),
    "empty": lambda: jnp.zeros((0, 3)),
    "slash/../dots": lambda: jnp.ones(2),
}


def _assert_equal_bits(found: Any, wanted: Any) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert (found.shape, found.dtype, found.tobytes()) == (
        wanted.shape,
        wanted.dtype,
        wanted.tobytes(),
    )


def test_every_kind_of_leaf_comes_back_bit_for_bit(url: str) -> None:
    state = {name: make() for name, make in _MIXED.items()}
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    with Checkpoints(url) as checkpoints:
        checkpoints.save(5, (model, state), {"epoch": 2})
    with Checkpoints(url) as checkpoints:
        restored = checkpoints.restore((other, dict.fromkeys(state) | state))
        assert restored is not None
        assert (restored.step, restored.notes) == (5, {"epoch": 2})
        assert str(checkpoints.path(5)) == f"{url}/5"
        assert str(checkpoints.directory) == url
    _assert_equal_bits(other.kernel[...], model.kernel[...])
    for name, wanted in state.items():
        _assert_equal_bits(restored.state[1][name], wanted)


def test_all_bit_patterns_of_all_dtypes_come_back(url: str) -> None:
    mesh = jax.make_mesh((4,), ("a",))
    rows, columns = (jax.NamedSharding(mesh, jax.P(*s)) for s in (("a",), (None, "a")))
    host = {name: bits.make_patterns(name) for name in bits.DTYPES}
    with Checkpoints(url) as checkpoints:
        checkpoints.save(1, {"rows": bits.make_state(rows), "host": host})
        restored = checkpoints.restore({"rows": bits.make_empty(columns), "host": host})
    assert restored is not None
    for name in bits.DTYPES:
        bits.assert_equal_bits(name, restored.state["rows"][name])
        bits.assert_equal_bits(name, restored.state["host"][name])


_LAYOUTS = {"rows": ("a",), "columns": (None, "b"), "both": ("a", "b"), "whole": ()}


@pytest.mark.parametrize("saved", _LAYOUTS)
@pytest.mark.parametrize("wanted", _LAYOUTS)
def test_a_sharded_array_is_read_with_any_sharding(url: str, saved: str, wanted: str) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    values = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    put, like = (
        jax.device_put(x, jax.NamedSharding(mesh, jax.P(*_LAYOUTS[layout])))
        for x, layout in ((values, saved), (np.zeros_like(values), wanted))
    )
    with Checkpoints(url) as checkpoints:
        checkpoints.save(1, {"w": put})
        restored = checkpoints.restore({"w": like})
    assert restored is not None
    assert restored.state["w"].sharding == like.sharding
    _assert_equal_bits(restored.state["w"], values)


def test_changes_after_save_do_not_reach_the_checkpoint(url: str) -> None:
    array, jitted = np.ones(1000, np.float32), jax.jit(lambda x: x + 1, donate_argnums=0)
    donated = jnp.ones(1000)
    with Checkpoints(url) as checkpoints:
        checkpoints.save(1, {"a": array, "d": donated})
        array[:] = 2
        jax.block_until_ready(jitted(donated))
        restored = checkpoints.restore({"a": np.zeros(1000, np.float32), "d": jnp.zeros(1000)})
    assert restored is not None
    assert (np.asarray(restored.state["a"]) == 1).all()
    assert (np.asarray(restored.state["d"]) == 1).all()


def test_the_newest_are_kept_and_later_ones_discarded(url: str) -> None:
    with Checkpoints(url, keep=2) as checkpoints:
        for step in 1, 2, 3, 4:
            checkpoints.save(step, _make_state(step))
        assert checkpoints.steps() == (3, 4)
        assert checkpoints.discard_after(3) == (4,)
        assert checkpoints.steps() == (3,)
        assert _read(checkpoints) == (3, 3.0)
        checkpoints.save(4, _make_state(40))
        assert _read(checkpoints) == (4, 40.0)
        with pytest.raises(CheckpointError, match="step=4"):
            checkpoints.save(4, _make_state(5))
    left = {name.partition("/")[0] for name in _list(url)} - {
        ".jaxdist-job.lock",
        "checkpoints.json",
    }
    assert left == {"3", "4"}


# Killed


def _save_until(store: Proxy, k: int, url: str) -> bool:
    """Save checkpoint 3, and let no request reach the store from the k-th on: a kill."""
    is_killed = threading.Event()

    def fail(number: int, method: str, key: str) -> int | None:
        if number >= k:
            is_killed.set()
        return 403 if is_killed.is_set() else None

    store.reset()
    store.fail = fail
    with contextlib.suppress(CheckpointError), Checkpoints(url, keep=2) as checkpoints:
        checkpoints.save(3, _make_state(3))
    store.reset()
    return is_killed.is_set()


def test_a_job_killed_at_any_request_of_a_save_leaves_whole_checkpoints(
    store: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = set()
    with Checkpoints(f"{url}/0", keep=2) as checkpoints:
        for step in 1, 2:
            checkpoints.save(step, _make_state(step))
    begin = {name: (_get(url) / "0" / name).read_bytes() for name in _list(f"{url}/0")}
    for k in range(1, 200, tables.examples(3, long=1)):
        folder = f"{url}/{k}"
        for name, content in begin.items():
            (_get(folder) / name).write_bytes(content)
        monkeypatch.setenv("JAXDIST_JOB_ID", f"first {k}")
        was_killed = _save_until(store, k, folder)
        monkeypatch.setenv("JAXDIST_JOB_ID", f"second {k}")
        with Checkpoints(folder, keep=2) as checkpoints:
            steps = checkpoints.steps()
            assert steps in {(1, 2), (2, 3), (1, 2, 3)}
            newest = _read(checkpoints)
            assert newest == (steps[-1], float(steps[-1]))
            for step in steps:
                assert _read(checkpoints, step=step) == (step, float(step))
            outcomes.add(steps)
            checkpoints.save(4, _make_state(4))
            assert checkpoints.steps() == (steps[-1], 4)
            assert _read(checkpoints) == (4, 4.0)
        folders = {n.rpartition("/state/")[0] for n in _list(folder) if "/state/" in n}
        assert len(folders) == 2, "what was partly written is deleted"
        if not was_killed:
            break
    else:
        pytest.fail("a save has fewer requests")
    assert k > 8
    assert {(1, 2), (2, 3)} <= outcomes


# Other jobs


def test_a_second_job_is_refused_while_the_first_is_alive(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_JOB_ID", "first")
    with Checkpoints(url) as first:
        first.save(1, _make_state(1))
        with Checkpoints(url) as same:
            same.save(2, _make_state(2))
        # The lock of the first object is still held.
        monkeypatch.setenv("JAXDIST_JOB_ID", "second")
        with Checkpoints(url) as second:
            with pytest.raises(
                CheckpointError, match=rf"Another job uses '{url}': process \d+ on "
            ):
                second.save(3, _make_state(3))
            assert _read(second) == (2, 2.0)
            with pytest.raises(CheckpointError, match="Another job"):
                second.discard_after(1)
    with Checkpoints(url) as second:
        assert second.steps() == (1, 2)
        second.save(3, _make_state(3))


def test_a_job_that_stood_still_writes_nothing_after_another_one_took_over(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_lock, "_renew", lambda *_: None)
    monkeypatch.setenv("JAXDIST_JOB_ID", "first")
    first = Checkpoints(url)
    first.save(1, _make_state(1))
    first.wait_until_finished()
    monkeypatch.setenv("JAXDIST_JOB_ID", "second")
    with Checkpoints(url) as second:
        second.save(2, _make_state(2))
        second.wait_until_finished()
        monkeypatch.setenv("JAXDIST_JOB_ID", "first")
        first.save(3, _make_state(3))
        with pytest.raises(CheckpointError, match=r"cannot be written(.|\n)*Another job uses"):
            first.close()
        monkeypatch.setenv("JAXDIST_JOB_ID", "second")
        second.save(3, _make_state(30))
        assert _read(second) == (3, 30.0)


# Stores that fail


def test_a_bucket_that_does_not_exist_is_named(store: Proxy) -> None:
    with pytest.raises(BucketError, match=rf"{store.scheme}://missing/run(.|\n)*make it"):
        Checkpoints(f"{store.scheme}://missing/run")


def test_a_name_that_no_bucket_can_have_is_named(store: Proxy) -> None:
    with pytest.raises(BucketError, match="Correct the name of the bucket"):
        Checkpoints(f"{store.scheme}://No!Bucket/run")


def test_a_folder_without_checkpoints_stays_as_it_is(store: Proxy, url: str) -> None:
    for fail in (lambda *_: None, lambda _, method, key: 403 if method in "PUT POST" else None):
        store.fail = fail
        with Checkpoints(url) as checkpoints:
            assert checkpoints.steps() == ()
            assert _read(checkpoints) is None
    store.reset()
    assert _list(url) == []


def test_two_objects_of_one_job_do_not_delete_what_the_other_writes(url: str) -> None:
    first, second = BucketStorage(_get(url)), BucketStorage(_get(url))
    with first.lock, second.lock:
        name = first.prepare(1, "")
        (_get(url) / name / "notes").write_bytes(b"{}")
        other = second.prepare(2, "")
        (_get(url) / other / "notes").write_bytes(b"{}")
        first.publish(name, 1, 3, 0)
        first.prepare(3, "")
        assert _list(url)[1:] == [f"{name}/notes", f"{other}/notes", "checkpoints.json"]


def test_a_child_that_was_forked_does_not_release_the_lock(url: str) -> None:
    lock = BucketStorage(_get(url)).lock
    with lock:
        lock._process += 1
        lock.close()
        lock.check()
        lock._process -= 1
        assert lock._thread is not None
        assert lock._thread.is_alive()
    assert not lock._thread.is_alive()


@pytest.mark.parametrize("method", ["GET", "PUT POST", "DELETE"])
def test_a_request_that_is_not_allowed_is_named_and_loses_nothing(
    store: Proxy, url: str, method: str
) -> None:
    with Checkpoints(url, keep=1) as checkpoints:
        checkpoints.save(1, _make_state(1))
    store.fail = lambda number, found, key: 403 if found in method.split() else None
    with pytest.raises(CheckpointError) as caught, Checkpoints(url, keep=1) as checkpoints:
        checkpoints.save(2, _make_state(2))
    assert "role" in str(caught.value) or "AWS_ACCESS_KEY_ID" in str(caught.value)
    store.reset()
    with Checkpoints(url) as checkpoints:
        newest = checkpoints.steps()[-1]
        assert newest == (2 if method == "DELETE" else 1)
        assert _read(checkpoints) == (newest, float(newest))


def test_a_store_that_fails_in_a_discard_loses_nothing_more(store: Proxy, url: str) -> None:
    with Checkpoints(url) as checkpoints:
        for step in 1, 2, 3:
            checkpoints.save(step, _make_state(step))
    for k in range(1, 30):
        store.fail = lambda number, method, key, k=k: 403 if number >= k else None
        store.requests.clear()
        try:
            with Checkpoints(url) as checkpoints:
                checkpoints.discard_after(1)
        except CheckpointError:
            store.reset()
            with Checkpoints(url) as checkpoints:
                steps = checkpoints.steps()
                assert steps in {(1, 2, 3), (1, 2), (1,)}
                assert _read(checkpoints) == (steps[-1], float(steps[-1]))
        if store.requests and k > len(store.requests):
            break
    store.reset()
    with Checkpoints(url) as checkpoints:
        assert checkpoints.steps() == (1,)


@pytest.mark.parametrize("status", [503, 429, 0])
def test_requests_that_fail_now_and_then_are_repeated(store: Proxy, url: str, status: int) -> None:
    store.fail = lambda number, method, key: status if number % 3 == 0 else None
    with Checkpoints(url, keep=2) as checkpoints:
        for step in 1, 2, 3:
            checkpoints.save(step, _make_state(step))
        assert checkpoints.steps() == (2, 3)
        assert _read(checkpoints) == (3, 3.0)
        assert checkpoints.discard_after(2) == (3,)
        checkpoints.save(3, _make_state(30))
    with Checkpoints(url) as checkpoints:
        assert _read(checkpoints) == (3, 30.0)


def test_a_store_that_fails_while_it_is_read_is_no_damage(store: Proxy, url: str) -> None:
    with Checkpoints(url) as checkpoints:
        for step in 1, 2:
            checkpoints.save(step, _make_state(step))
    for k in range(1, 60):
        store.reset()
        store.fail = lambda number, method, key, k=k: 503 if number >= k else None
        try:
            with Checkpoints(url) as checkpoints:
                assert _read(checkpoints, skip_damaged=True) == (2, 2.0)
        except BucketError:
            store.reset()
            continue
        break
    assert k > 5
    store.reset()
    with Checkpoints(url) as checkpoints:
        assert checkpoints.steps() == (1, 2)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_listings_that_are_late_lose_nothing(store: Proxy, url: str, lag: int) -> None:
    with Checkpoints(url, keep=2) as checkpoints:
        checkpoints.save(1, _make_state(1))
    store.lag = lag
    with Checkpoints(url, keep=2) as checkpoints:
        for step in 2, 3, 4, 5:
            checkpoints.save(step, _make_state(step))
            assert checkpoints.steps()[-1] == step
            assert _read(checkpoints) == (step, float(step))
    store.lag = 0
    with Checkpoints(url, keep=2) as checkpoints:
        for step in checkpoints.steps():
            assert _read(checkpoints, step=step) == (step, float(step))
        assert _read(checkpoints) == (5, 5.0)
        checkpoints.save(6, _make_state(6))
        assert checkpoints.steps() == (5, 6)


def test_a_restore_of_800_shards_takes_few_requests(store: Proxy, url: str) -> None:
    sharding = jax.NamedSharding(jax.make_mesh((8,), ("a",)), jax.P("a"))
    values = np.random.default_rng(0).normal(size=(100, 8, 50)).astype(np.float32)
    with Checkpoints(url) as checkpoints:
        checkpoints.save(1, {str(i): jax.device_put(x, sharding) for i, x in enumerate(values)})
    like = {str(i): jax.device_put(np.zeros((8, 50), np.float32), sharding) for i in range(100)}
    with Checkpoints(url) as checkpoints:
        store.requests.clear()
        restored = checkpoints.restore(like)
        requests = list(store.requests)
    assert restored is not None
    for i, wanted in enumerate(values):
        _assert_equal_bits(restored.state[str(i)], wanted)
    names = [key.rpartition("/")[2] for _, key in requests]
    assert names.count("manifest.ocdbt") == 1
    # Before, each shard took one. How many neighbours are read at once depends on the machine.
    assert len(requests) < 200


def test_a_restore_reads_a_number_of_bytes_at_once_and_adds_each_array_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, started, most = 0, 0, 0

    class Counted(shards._Read):
        def __init__(self, name: str, wanted: Any, array: Any) -> None:
            nonlocal started, most
            super().__init__(name, wanted, array)
            started += 1
            most = max(most, started)

        def __getattribute__(self, name: str) -> Any:
            nonlocal looked
            looked += name == "size"
            return super().__getattribute__(name)

        def finish(self, folder: Any) -> Any:
            nonlocal started
            started -= 1
            return super().finish(folder)

    state = {str(i): np.full(10, i, np.float32) for i in range(40)}
    with Checkpoints(url) as checkpoints:
        checkpoints.save(1, state)
        monkeypatch.setattr(shards, "_Read", Counted)
        monkeypatch.setattr(shards, "_READ_BYTES", 12 * 40)
        restored = checkpoints.restore({name: np.zeros_like(x) for name, x in state.items()})
    assert restored is not None
    for name, wanted in state.items():
        _assert_equal_bits(restored.state[name], wanted)
    # One is started before the first is waited for.
    assert (started, most) == (0, 13)
    # Before, of all that are being read for each array: about 500.
    assert looked <= 2 * len(state)


def test_a_folder_that_was_written_again_is_read_anew_by_the_same_process(url: str) -> None:
    for value in 1, 2:
        # A copied folder has no name of its own.
        with Checkpoints(f"{url}/from{value}") as checkpoints:
            checkpoints.save(7, _make_state(value))
        source = _get(url) / f"from{value}"
        names = source.list_names()
        (folder,) = {"/".join(n.split("/")[:2]) for n in names if n.startswith("7/")}
        for name in names:
            if name.startswith(folder):
                (_get(url) / "to" / name.replace(folder, "7/same")).write_bytes(
                    (source / name).read_bytes()
                )
        index = b'{"complete": {"7": "7/same"}, "damaged": {}}'
        (_get(url) / "to" / "checkpoints.json").write_bytes(index)
        with Checkpoints(f"{url}/to") as checkpoints:
            assert _read(checkpoints) == (7, float(value))


_PROFILES = """[default]
aws_access_key_id = {}
aws_secret_access_key = x

[{}]
aws_access_key_id = {}
aws_secret_access_key = x
"""


@pytest.mark.parametrize(
    ("files", "variables", "user"),
    [
        ((), {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, "a"),
        (
            ("credentials",),
            {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_PROFILE": "p"},
            "a",
        ),
        (("credentials",), {}, "DEFAULT"),
        (("credentials",), {"AWS_PROFILE": "p"}, "OTHER"),
        (("config",), {"AWS_DEFAULT_PROFILE": "p"}, "OTHER"),
        (("config", "credentials"), {"AWS_ACCESS_KEY_ID": "a"}, "DEFAULT"),
        (("elsewhere",), {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/elsewhere"}, "DEFAULT"),
    ],
)
def test_credentials_of_aws_are_those_that_its_tools_find_and_nothing_is_printed(
    files: tuple[str, ...],
    variables: dict[str, str],
    user: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = use_store("s3", monkeypatch)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name, value in {**variables, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for name in files:
        other = "profile p" if name == "config" else "p"
        (tmp_path / ".aws").mkdir(exist_ok=True)
        (tmp_path / ".aws" / name).write_text(_PROFILES.format("DEFAULT", other, "OTHER"))
    capfd.readouterr()
    assert not _get(f"s3://{BUCKET}/{tmp_path.name}").exists()
    assert store.users == {user}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("content", [None, "[default]\nregion=eu-west-1\n", "[", b"\xff"])
def test_a_profile_without_keys_is_left_to_the_role_of_the_machine(
    content: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert find_credentials() is None


_SSO = "[profile p]\nsso_session = mine\nsso_account_id = 1\n\n[sso-session mine]\n"


@pytest.mark.parametrize(
    ("variables", "config", "message"),
    [
        (
            {"AWS_PROFILE": "typo"},
            _PROFILES.format("a", "profile p", "b"),
            r"AWS_PROFILE=typo, the profile 'typo' is in none(.|\n)*unset AWS_PROFILE",
        ),
        ({"AWS_DEFAULT_PROFILE": "typo"}, None, "AWS_DEFAULT_PROFILE=typo, .* is in none"),
        ({"AWS_PROFILE": "default"}, "[", "AWS_PROFILE=default, .* is in none"),
        ({"AWS_PROFILE": "p"}, "[profile p]\nregion = x\n", "'p' has no credentials.*but region"),
        ({"AWS_PROFILE": "p"}, "[profile p]\n", "'p' has no credentials.*but no values"),
        (
            {"AWS_PROFILE": "p"},
            _SSO,
            r"sso_session(.|\n)*SSO is not supported(.|\n)*export-credentials --profile p --format",
        ),
        (
            {},
            "[default]\nsso_start_url = https://x\n",
            r"without AWS_PROFILE, the profile 'default' has.*sso_start_url(.|\n)*not supported",
        ),
    ],
    ids=["typo", "no files", "unreadable", "region", "empty", "sso", "sso of default"],
)
def test_a_profile_that_is_named_and_cannot_be_used_is_not_replaced_by_the_role_of_the_machine(
    variables: dict[str, str],
    config: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    use_store("s3", monkeypatch)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name, value in {**variables, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    if config is not None:
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws" / "config").write_text(config)
    with pytest.raises(BucketError, match=message):
        Checkpoints(f"s3://{BUCKET}/{tmp_path.name}")


# Damaged, copied


def test_changed_bytes_are_damage_and_can_be_skipped(store: Proxy, url: str) -> None:
    with Checkpoints(url) as checkpoints:
        for step in 1, 2:
            checkpoints.save(step, {"w": jnp.arange(4096.0) + step})
    folder = _get(url)
    (name,) = [n for n in _list(url) if n.startswith("2/") and "/d/" in n]
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(bytes(content))
    with Checkpoints(url) as checkpoints:
        like = {"w": jnp.zeros(4096)}
        with pytest.raises(DamagedCheckpointError, match=r"Checkpoint 2 in .* is damaged"):
            checkpoints.restore(like)
        restored = checkpoints.restore(like, skip_damaged=True)
        assert restored is not None
        assert restored.step == 1
        assert [str(path) for path in restored.set_aside] == [
            f"{url}/{name.partition('/state')[0]}"
        ]
        assert checkpoints.steps() == (1,)
        checkpoints.save(2, {"w": jnp.arange(4096.0)})
        assert checkpoints.steps() == (1, 2)
    (folder / name).unlink()


def test_objects_that_are_gone_are_named(url: str) -> None:
    with Checkpoints(url) as checkpoints:
        for step in 1, 2:
            checkpoints.save(step, _make_state(step))
    for name in _list(url):
        if name.startswith("2/") and name.endswith("metadata"):
            (_get(url) / name).unlink()
        if name.startswith("1/") and name.endswith("process_0.json"):
            (_get(url) / name).unlink()
    with Checkpoints(url) as checkpoints:
        with pytest.raises(DamagedCheckpointError, match="The notes cannot be read"):
            _read(checkpoints)
        with pytest.raises(
            DamagedCheckpointError,
            match=rf"no checksums of process 0(.|\n)*discard_after\(0\) of training.Checkpoints"
            rf"\('{url}'\)",
        ):
            _read(checkpoints, step=1)
        with pytest.raises(CheckpointError, match="Checkpoint 9 is not in"):
            _read(checkpoints, step=9)
        # What the message says.
        assert checkpoints.discard_after(0) == (1, 2)
        assert _read(checkpoints) is None
        checkpoints.save(1, _make_state(1))
        assert _read(checkpoints) == (1, 1.0)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"complete": 3}'])
def test_a_list_of_checkpoints_that_cannot_be_read_is_no_empty_folder(
    url: str, content: bytes
) -> None:
    (_get(url) / "checkpoints.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checkpoints\.json cannot be read"):
        Checkpoints(url)


def test_of_two_attempts_at_one_step_one_counts(url: str) -> None:
    storage = BucketStorage(_get(url))
    with storage.lock:
        first, second = storage.prepare(1, ""), storage.prepare(1, "")
        storage.publish(first, 1, 3, 0)
        storage.publish(first, 1, 3, 0)
        with pytest.raises(FileExistsError, match="another job has written checkpoint 1"):
            storage.publish(second, 1, 3, 0)
    assert storage.list_steps() == (1,)


def test_a_folder_is_restored_after_it_is_copied_in_both_directions(
    store: Proxy, url: str, tmp_path: pathlib.Path
) -> None:
    folder, tmp_path = _get(url), tmp_path / "run#1 100%41"
    with Checkpoints(url) as checkpoints:
        for step in 1, 2:
            checkpoints.save(step, _make_state(step), {"epoch": step})
    for name in folder.list_names():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == (1, 2)
        assert _read(checkpoints) == (2, 2.0)
        checkpoints.save(3, _make_state(3))
        assert _read(checkpoints) == (3, 3.0)
    for file in tmp_path.rglob("*"):
        # The emulator takes no empty object, and the guard of a local lock is one.
        if file.is_file() and file.stat().st_size:
            (folder / "up" / file.relative_to(tmp_path).as_posix()).write_bytes(file.read_bytes())
    with Checkpoints(f"{url}/up") as checkpoints:
        assert checkpoints.steps() == (1, 2, 3)
        for step in 1, 2, 3:
            assert _read(checkpoints, step=step) == (step, float(step))
        checkpoints.save(4, _make_state(4))
        assert _read(checkpoints) == (4, 4.0)


@pytest.mark.parametrize("address", ["gs://", "s3:///run", "gs://bu\0cket/run", "az://bucket/run"])
def test_an_address_that_names_no_bucket_is_refused(store: Proxy, address: str) -> None:
    with pytest.raises(ArgumentError, match="directory="):
        Checkpoints(address)
