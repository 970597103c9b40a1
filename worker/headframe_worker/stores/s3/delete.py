"""Deleting objects, up to 1,000 by one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from headframe_worker.stores.s3.errors import Fault, fault_of
from headframe_worker.stores.s3.retry import Requests

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def delete_objects(requests: Requests, keys: Sequence[str]) -> None:
    """Delete these keys of the bucket; a missing one is no error. A refusal of one key is raised as if it were the request's."""

    def delete(client: S3Client) -> None:
        answer = client.delete_objects(
            Bucket=requests.bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
        )
        for failure in answer.get("Errors", ()):
            response: Any = {"Error": failure, "ResponseMetadata": {"HTTPStatusCode": 403}}
            error = ClientError(response, "DeleteObjects")
            if fault_of(error) is not Fault.MISSING:
                raise error

    requests.call("DeleteObjects", f"s3://{requests.bucket}/{keys[0]}", delete)
