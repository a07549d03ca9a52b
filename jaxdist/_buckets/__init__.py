"""Objects in the buckets of Google Cloud Storage (`gs://`) and of S3 (`s3://`)."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._buckets.path import OCDBT_CACHE as OCDBT_CACHE
    from jaxdist._buckets.path import BucketPath as BucketPath
    from jaxdist._buckets.path import make_bucket_error as make_bucket_error
    from jaxdist._buckets.path import make_context as make_context
    from jaxdist._buckets.place import Place as Place
    from jaxdist._buckets.place import as_address as as_address
    from jaxdist._buckets.place import as_place as as_place
    from jaxdist._buckets.place import is_in_bucket as is_in_bucket
    from jaxdist._buckets.place import shorten_place as shorten_place

_open_late(__name__)
