"""Where `headframe bench` measures a bucket."""

from __future__ import annotations

from headframe_api.spec import S3Spec
from headframe_worker.bench.place import free_bytes, temporary_place
from headframe_worker.stores.observer import StoreObserver
from headframe_worker.stores.s3.store import S3Store
from testbed.s3 import S3Server


def test_the_place_is_a_prefix_beside_the_output_s_and_empty_afterwards(s3_server: S3Server) -> None:
    bucket, s3 = s3_server.new_bucket(), S3Spec(endpoint=s3_server.endpoint)
    output = S3Store(f"s3://{bucket}/some/out", s3)
    output.write("plan.json", [memoryview(b"{}")])
    with temporary_place(output.uri, None, s3, StoreObserver()) as place:
        assert place.uri.startswith(f"s3://{bucket}/some/out.headframe-bench-")
        assert free_bytes(place) is None
        place.write("states/shard-00000/part", [memoryview(b"x")])
        assert [info.key for info in output.list()] == ["plan.json"]
    assert [info.key for info in S3Store(f"s3://{bucket}", s3).list()] == ["some/out/plan.json"]
    output.close()
