"""What describes the states on disk: a part's metadata, a shard's manifest, the dataset's manifest."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headframe_api.base import DiskModel
from headframe_api.plan import FORMAT_VERSION, LengthPercentiles, ModelIdentity, StatesLayout, TokensIdentity


class SlotStatistics(DiskModel):
    """One slot's states over many tokens, from the values before they are stored; norms are per-token L2 norms over H, in float32."""

    tokens: int
    sum: float
    """Sum of all values: reading the part again must give it within rounding."""
    norm_mean: float
    norm_min: float
    norm_max: float


class QuarantinedRow(DiskModel):
    """One refused sample: a line of quarantine/*.jsonl."""

    row: int | None
    """Row in tokens/; null where the sample never became one."""
    sample_id: str
    where: str
    """Where it stood: file and line or row, such as `chats.jsonl:17`."""
    reason: str
    """A CamelCase word out of a bounded set, such as InvalidJson, EmptySample, NonFinite."""
    message: str
    """What was wrong, in words."""


class PartMetadata(DiskModel):
    """What a part's safetensors header says of it (each field as a string; structures as JSON)."""

    format_version: Literal[1] = FORMAT_VERSION
    plan: str
    """Digest of the plan."""
    shard: int
    part: int
    layers: list[int]
    last: Literal["preNorm", "postNorm", "none"]
    model: str
    revision: str
    digest: str = ""
    """`crc64nvme:` and 16 hex digits over everything after the header, so that a restart knows it without reading the tensors."""
    quarantined: list[QuarantinedRow] = Field(default_factory=list)
    """Samples of this part that were refused while extracting: they are not among its rows."""
    statistics: list[SlotStatistics] = Field(default_factory=list)
    """One a slot, in slot order."""


class PartEntry(DiskModel):
    """One part as its shard's manifest lists it."""

    part: int
    samples: int
    tokens: int
    bytes: int
    """Size of the whole object."""
    digest: str
    """As in the part's metadata: `crc64nvme:` and 16 hex digits over everything after the header."""
    quarantined: list[QuarantinedRow] = Field(default_factory=list)
    statistics: list[SlotStatistics] = Field(default_factory=list)


class Throughput(DiskModel):
    """One stretch of a worker's time, for the report's curve."""

    seconds: float
    """Wall clock since the shard's start, at the end of the stretch."""
    tokens: int
    samples: int


class StagePlacement(DiskModel):
    """The layers of one GPU where a replica is spread over several; first and last are 0-based and both included."""

    device: str
    first_layer: int
    last_layer: int


class ExtractionRun(DiskModel):
    """How a shard was computed: one entry for each process that committed parts of it."""

    started_at: str
    wall_seconds: float
    model_load_seconds: float
    device: str
    """Such as `NVIDIA H200`, `2 x NVIDIA H200` or `CPU`."""
    placement: list[StagePlacement] = Field(default_factory=list)
    """How the layers are spread over the GPUs of one replica; empty for one device."""
    versions: dict[str, str]
    attention: str
    fusions: list[str] = Field(default_factory=list)
    """Fused kernels that were verified and used; empty is plain Transformers."""
    slow_path: list[str] = Field(default_factory=list)
    """Mixers that ran on a slow reference path."""
    self_check_error: float
    """Largest relative L2 difference between a sample alone and inside a padded batch."""
    batch_tokens: int
    padding_fraction: float
    out_of_memory_retries: int
    parts: list[int]
    stage_seconds: dict[str, float]
    """Busy seconds of data, forward, copy and write, and waiting_data and waiting_write, in which the forward stood still.
    Stages overlap, so they may add up to more than wall_seconds."""
    throughput: list[Throughput] = Field(default_factory=list)


class ShardManifest(DiskModel):
    """states/shard-i/manifest.json: written last; its presence commits the shard."""

    format_version: Literal[1] = FORMAT_VERSION
    plan: str
    shard: int
    samples: int
    tokens: int
    bytes: int
    parts: list[PartEntry]
    runs: list[ExtractionRun]


class ShardEntry(DiskModel):
    """One shard as the dataset's manifest lists it."""

    shard: int
    samples: int
    tokens: int
    bytes: int
    parts: int
    quarantined: int
    manifest_digest: str
    """`sha256:` of the shard's manifest.json."""


class DatasetManifest(DiskModel):
    """manifest.json: enough to read the dataset without Headframe, and to know where it came from."""

    format_version: Literal[1] = FORMAT_VERSION
    plan: str
    created_at: str
    versions: dict[str, str]
    model: ModelIdentity
    tokens_from: TokensIdentity
    states: StatesLayout
    slot_names: list[str]
    hidden_size: int
    rows_in: int
    samples: int
    """Samples whose states are stored."""
    tokens: int
    loss_tokens: int
    bytes: int
    lengths: LengthPercentiles
    quarantined: dict[str, int]
    """Refused samples by reason, of prepare and extract together."""
    failed_shards: list[int]
    """Shards that are missing; their samples are counted in missing_samples. Empty for a whole dataset."""
    missing_samples: Annotated[int, Field(ge=0)] = 0
    samples_digest: str
    """`sha256:` of samples.parquet."""
    fusions: list[str]
    attention: list[str]
    shards: list[ShardEntry]
    statistics: list[SlotStatistics]
    """One a slot, over all shards."""
