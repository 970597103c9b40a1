"""How fast a checkpoint in the page cache reaches the GPU: `load_safetensors` against safetensors' own loader, in one run.

python benchmarks/weights.py --gigabytes 8 --out benchmarks/results/weights.json
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headframe_worker.engine.weights import load_safetensors

DEVICE = torch.device("cuda", 0)
ROWS, COLUMNS = 17408, 5120  # one projection of a 27B model's feed-forward block


def write_checkpoint(folder: Path, gigabytes: float) -> list[Path]:
    """Files of eight large tensors and some small ones each, like a real model's."""
    per_file = 8 * ROWS * COLUMNS * 2
    files = []
    for i in range(max(1, round(gigabytes * 1e9 / per_file))):
        tensors = {
            f"layers.{i}.{j}.weight": torch.randn(ROWS, COLUMNS, device=DEVICE).bfloat16().cpu() for j in range(8)
        }
        tensors |= {f"layers.{i}.{j}.norm": torch.randn(COLUMNS).bfloat16() for j in range(16)}
        files.append(folder / f"model-{i:05d}.safetensors")
        save_file(tensors, files[-1])
    return files


def rate(load, total_bytes: int, repeats: int) -> list[float]:
    """GB/s of each repeat, the best first."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        kept = load()
        torch.cuda.synchronize()
        found.append(total_bytes / (time.perf_counter() - start) / 1e9)
        del kept
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; a temporary folder by default")
    parser.add_argument("--threads", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        files = write_checkpoint(Path(folder), options.gigabytes)
        total = sum(file.stat().st_size for file in files)
        result = {
            "bytes": total,
            "load_file": rate(lambda: [load_file(f, device="cuda") for f in files], total, options.repeats),
        }
        for threads in options.threads:

            def load(threads=threads):
                return list(load_safetensors(files, device=DEVICE, dtype=None, threads=threads))

            result[f"threads_{threads}"] = rate(load, total, options.repeats)
        wanted = load_file(files[0])
        found = dict(load_safetensors(files[:1], device=DEVICE, dtype=None))
        assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in wanted.items())
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, rates in result.items():
        if name != "bytes":
            print(
                f"{name:<12} best {rates[0]:6.1f} GB/s, worst {rates[-1]:6.1f}; {rates[0] / result['load_file'][0]:.1f}x load_file"
            )


if __name__ == "__main__":
    main()
