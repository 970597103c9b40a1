"""Which paths of a spec are local, and which volumes carry them."""

import pytest

from headframe_api.mounts import local_paths, unmounted_paths
from headframe_api.spec import ExtractionJobSpec
from testbed.manifests import Json, merge

BASE: Json = {"model": {"source": "Qwen/Qwen3-8B"}, "dataset": {"source": "org/data"}, "output": {"uri": "s3://b/o"}}
MOUNTED: Json = {"worker": {"volumes": [{"name": "d"}], "volumeMounts": [{"name": "d", "mountPath": "/data"}]}}
READ_ONLY: Json = {"worker": {"volumeMounts": [{"name": "d", "mountPath": "/data", "readOnly": True}]}}


def spec(*patches: Json) -> ExtractionJobSpec:
    """A spec from the base and patches on it."""
    document = BASE
    for patch in patches:
        document = merge(document, patch)
    return ExtractionJobSpec.model_validate(document)


@pytest.mark.parametrize(
    ("patch", "field", "path"),
    [
        ({"model": {"source": "/models/a"}}, "spec.model.source", "/models/a"),
        ({"model": {"source": "./a"}}, "spec.model.source", "./a"),
        ({"model": {"source": "a.gguf"}}, "spec.model.source", "a.gguf"),
        ({"dataset": {"source": "data/chats.jsonl"}}, "spec.dataset.source", "data/chats.jsonl"),
        ({"dataset": {"source": "data/*"}}, "spec.dataset.source", "data/*"),
        ({"dataset": {"source": "/data/saved"}}, "spec.dataset.source", "/data/saved"),
        ({"dataset": {"chatTemplate": "/data/t.jinja"}}, "spec.dataset.chatTemplate", "/data/t.jinja"),
        ({"model": {"source": "file:///models/a%20b"}}, "spec.model.source", "/models/a b"),
        ({"dataset": {"source": "file:///data/?.jsonl"}}, "spec.dataset.source", "/data/?.jsonl"),
        ({"output": {"uri": "file:///out%20put"}}, "spec.output.uri", "/out put"),
        ({"output": {"uri": "out"}}, "spec.output.uri", "out"),
    ],
)
def test_local_paths_are_found_and_refused_without_a_volume(patch: Json, field: str, path: str) -> None:
    found = list(local_paths(spec(patch)))
    assert [(local.field, local.path) for local in found] == [(field, path)]
    assert [fault.startswith(f"{field}: {path} is a local path") for fault in unmounted_paths(spec(patch))] == [True]


@pytest.mark.parametrize(
    "patch",
    [
        {},
        {"model": {"source": "gpt2"}},
        {"model": {"source": "s3://m/x"}},
        {"dataset": {"source": "s3://d/*.jsonl", "chatTemplate": "{{ messages }}"}},
        {"dataset": {"chatTemplate": "{% for m in messages %}\n{{ m }}{% endfor %}"}},
    ],
)
def test_what_is_not_local_needs_no_volume(patch: Json) -> None:
    assert unmounted_paths(spec(patch)) == []


def test_a_mount_carries_what_lies_below_it_and_nothing_else() -> None:
    assert unmounted_paths(spec(MOUNTED, {"output": {"uri": "/data/out"}})) == []
    assert unmounted_paths(spec(MOUNTED, {"output": {"uri": "/database"}})) != []
    assert unmounted_paths(spec(MOUNTED, {"output": {"uri": "/data/../etc"}})) != []


def test_the_cache_is_a_volume_too() -> None:
    assert unmounted_paths(spec({"worker": {"cache": {"emptyDir": {}}}, "model": {"source": "/cache/model"}})) == []


def test_nothing_is_written_to_a_read_only_mount() -> None:
    assert unmounted_paths(spec(READ_ONLY, {"dataset": {"source": "/data/x.jsonl"}})) == []
    assert "read-only" in unmounted_paths(spec(READ_ONLY, {"output": {"uri": "/data/out"}}))[0]
