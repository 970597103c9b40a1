"""What a manifest may say: the table that the API server judges too, and how errors read."""

from pathlib import Path

import pytest
import yaml

from headframe_api.errors import ConfigError
from headframe_api.parse import parse_job
from headframe_worker.job_file import load_job
from testbed.manifests import Json, invalid_specs, manifest, merge, valid_specs

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
BASE = valid_specs()["as little as possible"]


def fault_of(document: Json) -> str:
    """The error that a document gives."""
    with pytest.raises(ConfigError) as caught:
        parse_job(document, where="job.yaml")
    return caught.value.message


@pytest.mark.parametrize("spec", valid_specs().values(), ids=valid_specs().keys())
def test_valid_manifests_are_taken(spec: Json) -> None:
    assert parse_job(manifest(spec)).spec.output.uri == spec["output"]["uri"]


@pytest.mark.parametrize(
    ("spec", "field"), [(s, f) for _, s, f in invalid_specs()], ids=[t for t, _, _ in invalid_specs()]
)
def test_invalid_manifests_are_refused_by_field(spec: Json, field: str) -> None:
    assert f"  {field}" in fault_of(manifest(spec))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    jobs = [document for document in yaml.safe_load_all(path.read_text()) if document["kind"] == "ExtractionJob"]
    assert jobs
    assert all(parse_job(job) for job in jobs)


def test_all_errors_come_at_once() -> None:
    spec = merge(
        BASE, {"model": {"gpus": -1}, "output": {"uri": "gs://x"}, "shards": 0, "worker": {"env": [{"value": "x"}]}}
    )
    message = fault_of(manifest(spec))
    assert message.startswith("job.yaml: 4 errors\n")
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == [
        "spec.model.gpus",
        "spec.output.uri",
        "spec.shards",
        "spec.worker.env[0].name",
    ]


@pytest.mark.parametrize(
    ("patch", "line"),
    [
        ({"states": {"layres": [1]}}, "spec.states.layres: unknown field; did you mean 'layers'?"),
        ({"worker": {"volumemounts": []}}, "spec.worker.volumemounts: unknown field; did you mean 'volumeMounts'?"),
        ({"states": {"zzz": 1}}, "spec.states.zzz: unknown field; allowed are preset, layers, last, dtype"),
        (
            {"states": {"preset": "dflahs"}},
            "spec.states.preset: 'dflahs' must be 'dflash', 'eagle3' or 'none' (did you mean 'dflash'?)",
        ),
        ({"shards": 0}, "spec.shards: 0 must be 'auto' or must be at least 1"),
        ({"workers": "4"}, "spec.workers: '4' must be an integer"),
        ({"model": {"gpus": 65}}, "spec.model.gpus: 65 must be at most 64"),
        ({"states": {"layers": [4, 4]}}, "spec.states.layers: [4] more than once; name each layer once"),
    ],
)
def test_an_error_names_path_value_and_what_is_allowed(patch: Json, line: str) -> None:
    assert fault_of(manifest(merge(BASE, patch))).splitlines()[1:] == [f"  {line}"]


def test_secrets_in_the_environment_are_not_shown() -> None:
    spec = merge(BASE, {"worker": {"env": [{"name": "HF_TOKEN", "value": ["hf_secret"]}]}})
    message = fault_of(manifest(spec))
    assert "spec.worker.env[0].value" in message
    assert "hf_secret" not in message


def test_a_status_is_no_reason_to_refuse() -> None:
    assert parse_job({**manifest(BASE), "status": {"phase": "Pending", "fromTheFuture": 1}}).status is None


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_a_document_must_be_a_mapping(document: object) -> None:
    with pytest.raises(ConfigError, match="must hold one ExtractionJob"):
        parse_job(document)


def test_broken_yaml_is_told_by_line_and_column(tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text("spec: [1\nkind: 2\n")
    with pytest.raises(ConfigError, match=r"job\.yaml: not valid YAML: line 2, column 5: expected ',' or '\]'"):
        load_job(manifest)
