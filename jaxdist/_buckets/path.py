"""`BucketPath`: an object in a bucket, or all objects below a name, by tensorstore.

tensorstore comes with Orbax, has both kinds of stores and their conditions for writes, and finds
credentials as the tools of each cloud do. It is imported at the first access: local paths load none
of it.
"""

import collections
import contextlib
import functools
import itertools
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from jaxdist._buckets.credentials import find_credentials
from jaxdist.errors import BucketError

# Each scheme with the driver of tensorstore.
SCHEMES = {"gs": "gcs", "s3": "s3"}

# A store that answers 503 or cuts a connection is asked again for about a minute.
_RETRIES = {"max_retries": 10, "initial_delay": "200ms", "max_delay": "10s"}
# For the tree of an OCDBT database, or each array of it would be found by reading the tree again.
OCDBT_CACHE = {"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}}
_READS = 16  # ranges of an object at once
_MISSING = b"\x02"  # tensorstore's version of an object that does not exist


class BucketPath:
    """An address in a bucket, with the methods of `pathlib.Path` that have a meaning there.

    It is no `os.PathLike`: a function that opens local files raises TypeError, and makes no local
    folder `gs:`.

    Args:
        scheme: "gs" or "s3".
        bucket: The name of the bucket.
        key: The name of an object, or of a folder.

    Raises:
        BucketError: The bucket does not exist, the credentials do not allow the access, or the
            store cannot be reached.

    Example:
        >>> folder = BucketPath("gs", "bucket", "runs/")
        >>> print(folder / "7" / "notes")
        gs://bucket/runs/7/notes
    """

    def __init__(self, scheme: str, bucket: str, key: str) -> None:
        self.scheme, self.bucket = scheme, bucket
        # As `pathlib` does it: an empty name or "." is left out.
        self.key = "/".join(part for part in key.split("/") if part not in ("", "."))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    def __repr__(self) -> str:
        return f"BucketPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> "BucketPath":
        return BucketPath(self.scheme, self.bucket, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "BucketPath":
        """The folder that this is in."""
        return BucketPath(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def get_spec(self) -> dict[str, Any]:
        """Return tensorstore's description of the folder."""
        return {**_describe(self.scheme, self.bucket), "path": f"{self.key}/" if self.key else ""}

    def read_bytes(self) -> bytes:
        """Return the content of the object."""
        found = self.read_version()
        if found is None:
            raise FileNotFoundError(f"{self} does not exist")
        return found[0]

    def read_version(self) -> tuple[bytes, bytes] | None:
        """Return the content and the version for `replace`; None if the object does not exist."""
        with self._name_errors():
            found = self._store.read(self.key).result()
        return None if found.state == "missing" else (found.value, found.stamp.generation)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yield ranges of bytes, each `(start, count)`, in this order; less where the object ends.

        Raises:
            FileNotFoundError: The object does not exist.
        """
        store = self._store
        started: collections.deque[Any] = collections.deque()
        waiting = iter(ranges)
        while True:
            # A few at a time, since each request waits for its answer.
            for start, count in itertools.islice(waiting, _READS - len(started)):
                started.append(store.read(self.key, byte_range=slice(start, start + count)))
            if not started:
                return
            with self._name_errors():
                found = started.popleft().result()
            if found.state == "missing":
                raise FileNotFoundError(f"{self} does not exist")
            yield found.value

    def write_bytes(self, content: bytes) -> None:
        """Write the object. A reader sees the old object or the whole new one."""
        with self._name_errors():
            self._store.write(self.key, content).result()

    def create(self, content: bytes) -> bool:
        """Write the object if it does not exist, and return whether this call has written it."""
        return self.replace(content, _MISSING) is not None

    def replace(self, content: bytes, version: bytes) -> bytes | None:
        """Write the object if it still has a version, and return its new version.

        Returns:
            None if somebody else has written the object in between.
        """
        with self._name_errors():
            written = self._store.write(self.key, content, if_equal=version).result().generation
        if written:
            return written
        # A request is repeated when its answer is lost, and then meets what it has written itself.
        found = self.read_version()
        return found[1] if found is not None and found[0] == content else None

    def check_bucket(self, must_write: bool = False) -> None:
        """Check that the bucket exists.

        Reading and listing cannot tell: in a bucket of Google Cloud Storage that does not exist,
        tensorstore finds no object and reports no error. So an object is written in this folder,
        and deleted.

        Args:
            must_write: Whether credentials that may only read are an error.

        Raises:
            BucketError: The bucket does not exist or cannot be reached, or `must_write` is not met.
        """
        probe = self / f".jaxdist-probe-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(b"1")
            probe.unlink()
        except BucketError as error:
            if must_write or not error.is_refused:
                raise

    def exists(self) -> bool:
        """Return whether the object exists. It is read, so a listing that is late does no harm."""
        with self._name_errors():
            # No byte of it.
            return self._store.read(self.key, byte_range=slice(0, 0)).result().state != "missing"

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete the object. A store does not report whether it existed."""
        with self._name_errors():
            self._store.write(self.key, None).result()

    def list_names(self) -> list[str]:
        """Return the names of all objects below this folder, relative to it and sorted.

        A bucket of Google Cloud Storage that cannot be listed has none: tensorstore does not
        report the error.

        Cost:
            One request for each thousand objects.
        """
        prefix = f"{self.key}/" if self.key else ""
        end = prefix[:-1] + chr(ord("/") + 1) if prefix else ""
        import tensorstore

        with self._name_errors():
            keys = self._store.list(range=tensorstore.KvStore.KeyRange(prefix, end)).result()
        # Only those of this folder, whatever a store returns: the names are deleted, among others.
        found = [key.decode() for key in keys]
        return sorted(key[len(prefix) :] for key in found if key.startswith(prefix))

    def rmtree(self) -> None:
        """Delete all objects below this folder."""
        store, names = self._store, self.list_names()
        with self._name_errors():
            # All at once, since each request waits for its answer.
            for done in [store.write((self / name).key, None) for name in names]:
                done.result()

    @property
    def _store(self) -> Any:
        with self._name_errors():
            return _open(json.dumps({**_describe(self.scheme, self.bucket), "path": ""}))

    @contextlib.contextmanager
    def _name_errors(self) -> Iterator[None]:
        try:
            yield
        except BucketError:
            raise
        except Exception as error:
            raise make_bucket_error(self, error) from error


def make_bucket_error(path: BucketPath, error: Exception) -> BucketError:
    """Return our error for an error of tensorstore."""
    text = str(error)
    scheme, bucket = path.scheme, path.bucket
    is_refused = any(word in text for word in ("PERMISSION_DENIED", "UNAUTHENTICATED"))
    if is_refused:
        remedy = _LOGIN[scheme]
    elif "NOT_FOUND" in text:
        remedy = f"Correct the name of the bucket, or make it: {_MAKE[scheme].format(bucket)}."
    elif any(word in text for word in ("INVALID_ARGUMENT", "Error parsing", "bucket name")):
        remedy = "Correct the name of the bucket."
    else:
        remedy = f"Check the network{_ENDPOINT[scheme]}, and run again."
    made = BucketError(
        f"{path} cannot be used: {text.partition(' [')[0][:_LONGEST_REASON]}.\n\n"
        "The bucket must exist, and this process must be allowed to list, read, write and delete "
        f"objects in it. A request that fails is repeated {_RETRIES['max_retries']} times.\n\n"
        f"{remedy}"
    )
    made.is_refused = is_refused
    return made


_LONGEST_REASON = 300  # characters
_LOGIN = {
    "gs": "Log in with `gcloud auth application-default login`, or give the service account of "
    "this machine the role Storage Object User.",
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, and allow "
    "s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject.",
}
_MAKE = {"gs": "gcloud storage buckets create gs://{}", "s3": "aws s3 mb s3://{}"}
_ENDPOINT = {"gs": "", "s3": " and AWS_ENDPOINT_URL"}


def _read_endpoint(scheme: str) -> str:
    """Return the address of a store that is compatible with S3, from the variables of AWS."""
    if scheme != "s3":
        return ""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _describe(scheme: str, bucket: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"driver": SCHEMES[scheme], "bucket": bucket}
    if endpoint := _read_endpoint(scheme):
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    credentials = find_credentials() if scheme == "s3" else None
    return spec if credentials is None else {**spec, "aws_credentials": credentials}


@functools.cache
def make_context() -> Any:
    """Return tensorstore's context of all buckets: how often a request is repeated, and a cache."""
    import tensorstore

    retries = {f"{driver}_request_retries": _RETRIES for driver in SCHEMES.values()}
    return tensorstore.Context({**retries, **OCDBT_CACHE})


@functools.cache
def _open(spec: str) -> Any:
    import tensorstore

    return tensorstore.KvStore.open(json.loads(spec), context=make_context()).result()
