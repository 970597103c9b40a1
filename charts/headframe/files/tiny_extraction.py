"""What `helm test` runs in the worker image: a tiny random model over a few rows of tokens, on the CPU, verified to the bit."""

import json
import subprocess
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path("/tmp/tiny")  # noqa: S108  (the pod's own)
MODEL, ROWS, JOB, OUTPUT = FOLDER / "model", FOLDER / "rows.jsonl", FOLDER / "job.yaml", FOLDER / "output"


def main() -> None:
    """Make model and rows, extract, verify. Any step that fails ends this with its exit code."""
    FOLDER.mkdir()
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, **shape)).save_pretrained(MODEL)
    with ROWS.open("w") as rows:
        for length in range(5, 40):
            rows.write(json.dumps({"input_ids": [(7 * step) % 256 for step in range(length)]}) + "\n")
    spec = {
        "model": {"source": str(MODEL), "gpus": 0, "dtype": "float32"},
        "dataset": {"source": str(ROWS), "format": "tokens", "lossMask": "all", "maxLength": 64},
        "output": {"uri": str(OUTPUT)},
    }
    job = {"apiVersion": "headframe.dev/v1alpha1", "kind": "ExtractionJob", "metadata": {"name": "tiny"}, "spec": spec}
    JOB.write_text(json.dumps(job))
    for command in (["run", JOB], ["verify", OUTPUT]):
        subprocess.run(["headframe", *map(str, command)], check=True)  # noqa: S603, S607
    print("extracted and verified")  # noqa: T201


if __name__ == "__main__":
    main()
