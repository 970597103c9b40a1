"""What a user writes: the spec of an ExtractionJob. The CRD and docs/manifest.md are generated from these models."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import unquote

from pydantic import AfterValidator, Field, model_validator

from headframe_api.base import KubernetesModel
from headframe_api.worker_spec import WorkerSpec

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1, le=2_147_483_647)]
ColumnName = Annotated[str, Field(min_length=1, max_length=255)]
StateDtype = Literal["bfloat16", "float16", "float32", "float8_e4m3fn"]


def _file_uri_is_whole(location: str) -> str:
    if location.startswith("file://") and not location.startswith("file:///"):
        raise ValueError("a file URI gives the path from the root; write file:///path")
    return location


Location = Annotated[str, Field(min_length=1, max_length=2048), AfterValidator(_file_uri_is_whole)]


class ModelSpec(KubernetesModel):
    """The model whose hidden states are extracted."""

    source: Location
    """Hub id (`Qwen/Qwen3-8B`), `s3://bucket/prefix`, a directory, or a `.gguf` file; a path may be written as `file:///path`."""
    revision: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """Branch, tag or commit of a hub id; prepare pins it to the commit. Only for hub ids."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What the model computes in."""
    trust_remote_code: bool = False
    """Run code that the model's repository carries. Off unless you ask for it."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Transformers' attention implementation; `auto` takes the fastest that is exact."""
    gpus: Annotated[int, Field(ge=0, le=64)] = 1
    """GPUs that one replica is spread over; 0 runs on the CPU."""

    @model_validator(mode="after")
    def _revision_needs_a_hub_id(self) -> ModelSpec:
        if self.revision is not None and not is_hub_id(self.source):
            raise ValueError("revision: applies to hub ids only; take it away or name a hub id in source")
        return self


class DatasetSpec(KubernetesModel):
    """The text, or the tokens, that go through the model."""

    source: Location
    """Hub id, or a path, glob, `file:///` or `s3://` URI of `.jsonl[.gz|.zst]`, `.json`, `.parquet`, `.arrow` files or a `save_to_disk` directory."""
    split: Annotated[str, Field(min_length=1, max_length=255)] = "train"
    """Split of a hub dataset or of a `save_to_disk` DatasetDict."""
    format: Literal["auto", "messages", "promptCompletion", "text", "tokens"] = "auto"
    """What a row holds; `auto` decides from the columns and says what it decided. `messages` also reads ShareGPT's `conversations`."""
    columns: Annotated[dict[str, ColumnName], Field(max_length=16)] = Field(default_factory=dict)
    """Your column for each of ours, where they differ: keys `id`, `messages`, `tools`, `prompt`, `completion`, `text`, `input_ids`, `loss_mask`."""
    chat_template: Annotated[str, Field(max_length=131_072)] | None = None
    """A Jinja chat template, or the path of a file that holds one, instead of the tokenizer's own."""
    loss_mask: Literal["assistant", "lastAssistant", "all"] = "assistant"
    """Which tokens a trainer is to learn: every assistant turn, the last one, or all."""
    max_length: PositiveInt = 4096
    """Longest sample, in tokens; may not exceed the model's own limit."""
    on_too_long: Literal["truncate", "drop", "fail"] = "truncate"
    """What happens to a longer sample: cut at maxLength, put in quarantine, or stop the job."""
    limit: PositiveInt | None = None
    """Only the first so many rows."""

    @model_validator(mode="after")
    def _known_columns(self) -> DatasetSpec:
        unknown = sorted(set(self.columns) - set(COLUMNS))
        if unknown:
            raise ValueError(f"columns: unknown key {', '.join(unknown)}; allowed: {', '.join(COLUMNS)}")
        return self

    @model_validator(mode="after")
    def _chat_settings_need_a_chat(self) -> DatasetSpec:
        if self.format in ("text", "tokens"):
            if self.chat_template is not None:
                raise ValueError(f"chatTemplate: format {self.format} renders no chat; take chatTemplate away")
            if self.loss_mask == "lastAssistant":
                raise ValueError(f"lossMask: format {self.format} has no turns; use all")
        return self


COLUMNS = ("id", "messages", "tools", "prompt", "completion", "text", "input_ids", "loss_mask")


class StatesSpec(KubernetesModel):
    """Which hidden states are kept, and as what."""

    preset: Literal["dflash", "eagle3", "none"] = "dflash"
    """The layers a drafter's training wants; `none` keeps only `layers` and `last`."""
    layers: Annotated[list[Annotated[int, Field(ge=-1)]], Field(max_length=1024)] | None = None
    """0-based decoder layers whose OUTPUT (residual stream, before any final norm) is kept; -1 is the embeddings. Overrides the preset."""
    last: Literal["preNorm", "postNorm", "none"] = "preNorm"
    """The last decoder layer's output: before the final norm, after it, or not kept."""
    dtype: StateDtype = "bfloat16"
    """What the states are stored as; `float8_e4m3fn` adds one scale a token and slot."""

    @model_validator(mode="after")
    def _something_is_kept(self) -> StatesSpec:
        if self.layers is not None and len(set(self.layers)) != len(self.layers):
            twice = sorted({layer for layer in self.layers if self.layers.count(layer) > 1})
            raise ValueError(f"layers: {twice} more than once; name each layer once")
        if not self.layers and self.last == "none" and (self.preset == "none" or self.layers is not None):
            raise ValueError("nothing to keep: no layers and last is none; name layers, a preset, or last")
        return self


class OutputSpec(KubernetesModel):
    """Where the dataset of hidden states is written."""

    uri: Location
    """`s3://bucket/prefix`, `file:///path`, or a path."""

    @model_validator(mode="after")
    def _known_scheme(self) -> OutputSpec:
        scheme, separator, rest = self.uri.partition("://")
        if separator and scheme not in ("s3", "file"):
            raise ValueError(f"uri: scheme {scheme!r} is not supported; use s3://bucket/prefix, file:///path or a path")
        if scheme == "s3" and separator and not rest.split("/", 1)[0]:
            raise ValueError("uri: names no bucket; write s3://bucket/prefix")
        return self


class S3Spec(KubernetesModel):
    """How every `s3://` of the spec is reached. Credentials come from boto3's usual chain or the named Secret, never from here."""

    endpoint: Location | None = None
    """URL of an S3-compatible server; unset means AWS."""
    region: str | None = None
    """Region; unset means boto3's own default."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """How the bucket is named in requests; `auto` is in the path where an endpoint is given, in the host name on AWS."""
    credentials_secret: str | None = None
    """Kubernetes Secret whose keys become the worker's environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN."""
    ca_secret: str | None = None
    """Kubernetes Secret with `ca.crt`, the certificate authority of the endpoint."""
    encryption: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Server-side encryption of what is written."""
    kms_key_id: str | None = None
    """Key for `aws:kms` and `aws:kms:dsse`."""
    storage_class: str | None = None
    """Storage class of what is written, such as INTELLIGENT_TIERING."""

    @model_validator(mode="after")
    def _key_needs_kms(self) -> S3Spec:
        if self.kms_key_id is not None and (self.encryption is None or not self.encryption.startswith("aws:kms")):
            raise ValueError("kmsKeyId: needs encryption aws:kms or aws:kms:dsse")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint: {self.endpoint!r} must start with http:// or https://")
        return self


class FailurePolicy(KubernetesModel):
    """How much may go wrong before the job is Failed."""

    retries_per_shard: Annotated[int, Field(ge=0, le=1000)] = 3
    """Retries of one shard; disruptions (preemption, drain, spot) do not count."""
    max_failed_shards: Annotated[int, Field(ge=0, le=100_000)] = 0
    """So many shards may fail and the rest is still finalized."""
    max_quarantined_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of the input samples that may end in quarantine, without those that `onTooLong: drop` puts there."""


class ExtractionJobSpec(KubernetesModel):
    """The whole configuration of an extraction: `kubectl apply` and `headframe run` take the same."""

    model: ModelSpec
    """The model whose hidden states are extracted. Immutable."""
    dataset: DatasetSpec
    """The text, or the tokens, that go through the model. Immutable."""
    states: StatesSpec = Field(default_factory=StatesSpec)
    """Which hidden states are kept, and as what. Immutable."""
    output: OutputSpec
    """Where the dataset of hidden states is written. Immutable."""
    s3: S3Spec = Field(default_factory=S3Spec)
    """How every `s3://` of the spec is reached."""
    shards: Auto | Annotated[int, Field(ge=1, le=100_000)] = "auto"
    """Units of work and retry; `auto` takes enough to balance and resume cheaply, few enough that loading models takes under 2 % of the time. Immutable."""
    workers: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Replicas of the model that work at the same time."""
    batch_tokens: Auto | PositiveInt = "auto"
    """Padded tokens in one forward pass; `auto` finds what fits the GPU's memory."""
    worker: WorkerSpec = Field(default_factory=WorkerSpec)
    """How the pods look."""
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    """How much may go wrong before the job is Failed."""
    suspend: bool = False
    """Stop all pods and keep what is done; false goes on from there."""
    active_deadline_seconds: PositiveInt | None = None
    """Fail if the job is not done so long after its start."""
    pending_deadline_seconds: PositiveInt | None = None
    """Fail if no worker runs so long after the job's start."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """Delete the ExtractionJob (never its output) so long after it ended."""


def is_hub_id(source: str) -> bool:
    """Whether a source can be a hub id: `name` or `owner/name`, and not a path, URI or file of weights."""
    if "://" in source or source.startswith(("/", ".", "~")) or source.endswith((".gguf", "/")):
        return False
    return source.count("/") <= 1


def local_path(location: str) -> str | None:
    """The path that a location names, be it as `file:///path` with percent-encoding; None where it has another scheme."""
    if location.startswith("file://"):
        return unquote(location.removeprefix("file://"))
    return None if "://" in location else location
