"""plan.json: everything the later stages need to know, fixed before a GPU is taken."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from headframe_api.base import DiskModel
from headframe_api.spec import StateDtype
from headframe_api.status import PlanSummary

FORMAT_VERSION: Literal[1] = 1
PART_TARGET_BYTES = 1 << 30
TOO_LONG: Literal["TooLong"] = "TooLong"
"""Why `onTooLong: drop` puts a sample in quarantine: by the user's wish, so maxQuarantinedFraction does not count it."""
STATE_DTYPE_BYTES: dict[StateDtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


class ModelIdentity(DiskModel):
    """Which model, so exactly that another run with the same plan gives the same states."""

    source: str
    """As in the spec."""
    revision: str
    """Commit of a hub model; else `sha256:` and a digest of the configuration and of every weight file's name, size, header and samples of its bytes."""
    architecture: str
    """Class name in the checkpoint's configuration, such as Qwen3ForCausalLM."""
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int | None
    """The model's own limit in tokens; null where it states none."""
    dtype: Literal["bfloat16", "float16", "float32"]
    """What the forward pass computes in."""
    norm_type: str
    """Class of the final norm, such as LlamaRMSNorm."""
    norm_gain: Literal["weight", "1+weight", "none"]
    """What the final norm multiplies by: trainers that rebuild post-norm states need it (Qwen3.5 and Gemma: 1 + weight)."""
    norm_epsilon: float | None
    embeddings_in_hidden_states: bool = True
    """Whether Transformers' `hidden_states` begin with the embeddings; Mamba2's begin with the output of layer 0."""


class TokensIdentity(DiskModel):
    """How the text became tokens."""

    source: str
    format: Literal["messages", "promptCompletion", "text", "tokens"]
    """What `auto` decided."""
    format_reason: str
    """Why, in words."""
    files_digest: str
    """Digest of the dataset's file names, sizes and modification identities; a hub dataset's commit."""
    tokenizer_digest: str
    chat_template_digest: str | None
    loss_mask: Literal["assistant", "lastAssistant", "all"]
    mask_method: Literal["generation", "prefix", "completion", "all", "given"]
    """`generation`: the template's own markers; `prefix`: differences of rendered prefixes; `given`: the dataset's column."""
    max_length: int
    on_too_long: Literal["truncate", "drop", "fail"]
    limit: int | None


class StatesLayout(DiskModel):
    """The S slots of `hidden_states` [T, S, H], in order: the layers, then `last` unless it is none."""

    layers: list[int]
    """0-based decoder layers whose output (residual stream, before any final norm) is stored; -1 is the embeddings."""
    hugging_face_indexes: list[int | None]
    """The same layers in Hugging Face's `hidden_states`: k + 1; where those lack the embeddings k, and null for -1."""
    last: Literal["preNorm", "postNorm", "none"]
    last_layer: int
    """Number of the last decoder layer, n - 1."""
    dtype: StateDtype

    @property
    def layers_from_one(self) -> tuple[int, ...]:
        """The same layers in speculators' and vLLM's numbering: k + 1, whatever the model."""
        return tuple(layer + 1 for layer in self.layers)

    @property
    def slots(self) -> int:
        """S, the number of stored states per token."""
        return len(self.layers) + (self.last != "none")

    @property
    def slot_names(self) -> tuple[str, ...]:
        """`embeddings` for -1, `layer.K` for a layer, then `last.preNorm` or `last.postNorm`."""
        names = ["embeddings" if layer < 0 else f"layer.{layer}" for layer in self.layers]
        return (*names, f"last.{self.last}") if self.last != "none" else tuple(names)

    def bytes_per_token(self, hidden_size: int) -> int:
        """Bytes a token takes in a part: its states, float8 scales, token id (int32) and loss mask (uint8)."""
        scales = 4 * self.slots if self.dtype == "float8_e4m3fn" else 0
        return self.slots * hidden_size * STATE_DTYPE_BYTES[self.dtype] + scales + 4 + 1


class ShardPlan(DiskModel):
    """One shard: a contiguous range of rows of tokens/, and exactly one of its files."""

    index: Annotated[int, Field(ge=0)]
    first_row: Annotated[int, Field(ge=0)]
    samples: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=0)]
    parts: Annotated[int, Field(ge=0)]


class LengthPercentiles(DiskModel):
    """Sample lengths in tokens."""

    minimum: int
    p50: int
    p90: int
    p99: int
    maximum: int
    mean: float


def plan_digest(document: Mapping[str, object]) -> str:
    """The digest of the deciding fields as plan.json holds them: of a plan of an earlier version, the fields that it knew."""
    deciding = {key: value for key, value in document.items() if key not in ("digest", "created_at", "versions")}
    canonical = json.dumps(deciding, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


class Plan(DiskModel):
    """What prepare decided. The digest covers every field that decides the output, not when or by which version it was made."""

    format_version: Literal[1] = FORMAT_VERSION
    digest: str
    """`sha256:...` over the canonical JSON of all fields but digest, created_at and versions."""
    created_at: str
    """RFC 3339, UTC."""
    versions: dict[str, str]
    """Headframe, transformers, tokenizers, datasets and Python as they were in prepare."""
    model: ModelIdentity
    tokens_from: TokensIdentity
    states: StatesLayout
    rows_in: int
    """Rows read from the dataset: samples + quarantined."""
    samples: int
    tokens: int
    loss_tokens: int
    quarantined: dict[str, int]
    """Refused rows by reason."""
    lengths: LengthPercentiles
    part_target_bytes: int = PART_TARGET_BYTES
    bytes: int
    """Expected size of all parts' tensors."""
    shards: list[ShardPlan]

    def computed_digest(self) -> str:
        """The digest of this plan's deciding fields."""
        return plan_digest(self.model_dump(mode="json"))

    def sealed(self) -> Plan:
        """This plan with its digest filled in."""
        return self.model_copy(update={"digest": self.computed_digest()})

    def summary(self) -> PlanSummary:
        """What the status of the custom resource says of the plan."""
        return PlanSummary(
            samples=self.samples,
            tokens=self.tokens,
            shards=len(self.shards),
            bytes=self.bytes,
            layers=self.states.layers,
            hidden_size=self.model.hidden_size,
            model_revision=self.model.revision,
        )
