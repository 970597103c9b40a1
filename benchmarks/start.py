"""From the start of a worker's process to a model that is ready: with empty caches of compiled kernels, and once more with full ones.

    python benchmarks/start.py --shape hybrid-27b --layers 16 --out benchmarks/results/start.json

A checkpoint of random weights is written first, so it lies in the page cache both times. Each start is a process of its own,
as each pod's is; they share nothing but the directory that the cache volume would hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
STARTED = "HEADFRAME_BENCHMARK_STARTED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="hybrid-27b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where checkpoint and caches go; a temporary folder by default")
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.checkpoint:
        print(json.dumps(start(options.checkpoint, options.device)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoint = Path(folder) / "model"
        subprocess.run(
            [sys.executable, "-c", WRITE, str(checkpoint), options.shape, str(options.layers or "")], check=True
        )
        environment = os.environ | {name: f"{folder}/cache/{name}" for name in CACHES}
        result = {"shape": options.shape, "layers": options.layers, "starts": []}
        result["bytes"] = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        for number in range(options.starts):
            line = subprocess.run(
                [sys.executable, __file__, "--checkpoint", str(checkpoint), "--device", options.device],
                env=environment | {STARTED: str(time.time())},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout.splitlines()[-1]
            found = json.loads(line)
            result["starts"].append(found)
            stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.items())
            print(f"start {number + 1}: ready in {sum(found.values()):.1f} s: {stages}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


WRITE = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from shapes import build
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
build(sys.argv[2], int(sys.argv[3]) if sys.argv[3] else None, device).save_pretrained(sys.argv[1])
"""


def start(checkpoint: Path, device: str) -> dict[str, float]:
    """Seconds of each step, of this very process."""
    import threading

    import numpy as np
    import torch
    import transformers

    from headframe_api.layers import hugging_face_indexes, preset_layers
    from headframe_api.plan import StatesLayout
    from headframe_worker.engine.engine import Engine, EngineSettings
    from headframe_worker.engine.loading import Checkpoint
    from headframe_worker.meter import Meter

    imported = time.time()
    torch.zeros(1, device=device)
    opened = time.time()
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    layers = list(preset_layers("dflash", config.num_hidden_layers))
    layout = StatesLayout(
        layers=layers,
        hugging_face_indexes=list(hugging_face_indexes(layers)),
        last="preNorm",
        last_layer=config.num_hidden_layers - 1,
        dtype="bfloat16",
    )
    random = np.random.default_rng(0)
    samples = [random.integers(3, config.vocab_size, length).astype(np.int32) for length in [1024] * 16 + [300]]
    engine = Engine(
        EngineSettings(Checkpoint(checkpoint), (torch.device(device),), torch.bfloat16, layout),
        samples,
        meter=Meter("extract"),
        stop=threading.Event(),
    )
    steps = asdict(engine.facts.start_seconds)
    engine.close()
    return {"imports": imported - float(os.environ[STARTED]), "device": opened - imported, **steps}


if __name__ == "__main__":
    main()
