"""Names that more than one component must spell alike: the resource, labels, environment, ports, object keys."""

from __future__ import annotations

from typing import Literal

GROUP = "headframe.dev"
VERSION = "v1alpha1"
API_VERSION: Literal["headframe.dev/v1alpha1"] = "headframe.dev/v1alpha1"
KIND: Literal["ExtractionJob"] = "ExtractionJob"
PLURAL = "extractionjobs"
SINGULAR = "extractionjob"
SHORT_NAME = "xj"

JOB_LABEL = f"{GROUP}/job"
"""On every child: the ExtractionJob's name, shortened with a hash where it is longer than a label value may be."""
STAGE_LABEL = f"{GROUP}/stage"
"""On every child: prepare, extract or finalize."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

HTTP_PORT = 8080
"""Where a worker serves /metrics, /progress, /healthz and /readyz."""

JOB_ENVIRONMENT = "HEADFRAME_JOB"
"""The whole ExtractionJob as JSON or YAML, for a stage that is given no file."""
SHARD_ENVIRONMENT = "JOB_COMPLETION_INDEX"
"""Which shard `headframe extract` works on; Kubernetes sets it in the pods of an Indexed Job."""
TERMINATION_LOG_ENVIRONMENT = "HEADFRAME_TERMINATION_LOG"
"""Where a stage writes its TerminationMessage; in pods /dev/termination-log. Unset: nowhere."""
CA_BUNDLE_ENVIRONMENT = "AWS_CA_BUNDLE"
"""File of certificate authorities in PEM for S3 endpoints; boto3's own variable. Pods find spec.s3.caSecret mounted there."""
CA_BUNDLE_PATH = "/etc/headframe/s3/ca.crt"
"""Where the operator mounts `ca.crt` of spec.s3.caSecret."""
S3_RETRY_SECONDS_ENVIRONMENT = "HEADFRAME_S3_RETRY_SECONDS"
"""How long a request to an object store that is down is tried again; unset: 25 minutes."""
LOG_FORMAT_ENVIRONMENT = "HEADFRAME_LOG_FORMAT"
"""`text` or `json`: how every process writes its log."""

CACHE_PATH = "/cache"
"""Where pods find the volume for the model hub, compiled kernels and autotuning results."""

# Object keys, relative to the output's URI.
JOB_KEY = "job.json"
PLAN_KEY = "plan.json"
MANIFEST_KEY = "manifest.json"
REPORT_KEY = "report.html"
SUCCESS_KEY = "_SUCCESS"
SAMPLES_KEY = "samples.parquet"
TOKENS_PREFIX = "tokens/"
STATES_PREFIX = "states/"
QUARANTINE_PREFIX = "quarantine/"


def shard_name(shard: int) -> str:
    """`shard-00007`; wider than five digits where the number is."""
    return f"shard-{shard:05d}"


def tokens_key(shard: int) -> str:
    """The Arrow file that holds exactly this shard's samples."""
    return f"{TOKENS_PREFIX}{shard_name(shard)}.arrow"


def shard_prefix(shard: int) -> str:
    """Where this shard's parts and its manifest lie, with a final slash."""
    return f"{STATES_PREFIX}{shard_name(shard)}/"


def part_key(shard: int, part: int) -> str:
    """One part of a shard's states."""
    return f"{shard_prefix(shard)}part-{part:05d}.safetensors"


def shard_manifest_key(shard: int) -> str:
    """Written last: its presence commits the shard."""
    return f"{shard_prefix(shard)}manifest.json"


def quarantine_key(stage: str, shard: int | None = None) -> str:
    """Refused samples: of prepare in one file, of extract in one file a shard."""
    return (
        f"{QUARANTINE_PREFIX}{stage}.jsonl"
        if shard is None
        else f"{QUARANTINE_PREFIX}{stage}-{shard_name(shard)}.jsonl"
    )
