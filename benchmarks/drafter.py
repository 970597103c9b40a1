"""From text to a drafter that guesses well: a verifier, its states by Headframe, speculators' own DFlash training on them, acceptance.

    python benchmarks/drafter.py --work /tmp/drafter --out benchmarks/results/h200-drafter.json     an H200, five minutes
    python benchmarks/drafter.py --work /tmp/drafter --tiny                                         a CPU: all but the training

Needs speculators 0.9.0 beside headframe; nothing is downloaded. Steps whose result lies in --work already are left out.

Acceptance is measured on files that neither verifier nor drafter has seen, in two ways. `text`: speculators' own measure,
the mean accepted run and the verifier's own token, over every place of held-out text. `greedy`: tokens a verifier step of greedy
speculative decoding. That yields the verifier's own greedy continuation, token by token, so it is enough to have that
continuation and its states (which Headframe extracts too), and to walk along it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than all of this run

import speculators.models.dflash  # noqa: F401  (registers the model)
import torch
import transformers
from small_verifier import SPECIAL, VerifierSize, pieces, python_sources, train_tokenizer, train_verifier
from speculators.model import SpeculatorModel
from speculators.models.metrics import compute_accepted_length_counts
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from headframe_worker.reader import Sample, StatesDataset

HERE = Path(__file__).parent
HEADFRAME = [sys.executable, "-m", "headframe_worker.cli.main"]
MISTAKES = {"early": "last state of one layer early", "normed": "last state normed already"}


@dataclass(frozen=True)
class Size:
    """Of the whole run."""

    verifier: VerifierSize
    corpus_bytes: int
    samples: int
    sample_characters: int
    max_length: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    epochs: int
    draft_layers: int
    block: int
    anchors: int
    tokens_a_step: int


SIZES = {
    "h200": Size(VerifierSize(8192, 512, 12, 512, 64, 60.0), 25_000_000, 1200, 1500, 512, 48, 64, 192, 8, 2, 8, 512, 8192),
    "tiny": Size(VerifierSize(600, 64, 8, 64, 8, 20.0), 3_000_000, 80, 200, 128, 3, 16, 24, 2, 1, 4, 64, 512),
}  # fmt: skip


class Run:
    """One run: where its files are, what it measured, how long each step took."""

    def __init__(self, work: Path, size: Size, device: torch.device) -> None:
        self.work, self.size, self.device = work, size, device
        self.verifier = work / "verifier"
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        print(f"-- {step}", flush=True)
        started = time.perf_counter()
        yield
        self.seconds[step] = round(time.perf_counter() - started, 1)
        print(f"   {self.seconds[step]} s", flush=True)

    def output(self, name: str) -> Path:
        """Where the job of this name writes its dataset."""
        return self.work / "out" / name

    def job(self, name: str, dataset: dict[str, Any]) -> Path:
        """The manifest of a job over this run's verifier; JSON is YAML too."""
        path = self.work / f"{name}.yaml"
        spec = {
            "model": {"source": str(self.verifier), "gpus": int(self.device.type == "cuda")},
            "dataset": {"maxLength": self.size.max_length, **dataset},
            "states": {"preset": "dflash"},
            "output": {"uri": str(self.output(name))},
        }
        manifest = {"apiVersion": "headframe.dev/v1alpha1", "kind": "ExtractionJob", "metadata": {"name": name}}
        path.write_text(json.dumps({**manifest, "spec": spec}))
        return path


def make_verifier(run: Run) -> dict[str, float]:
    """Train the verifier, and write the texts: the last tenth of `text.jsonl` is of held-out files."""
    report = run.work / "verifier.json"
    if not report.exists():
        size = run.size
        corpus = python_sources(size.corpus_bytes)
        tokenizer = train_tokenizer(corpus, size.verifier.vocabulary)
        model, measured = train_verifier(tokenizer, corpus, size.verifier, run.device)
        model.save_pretrained(run.verifier)
        tokenizer.save_pretrained(run.verifier)
        held_out = size.samples // 10
        training = _spread(list(pieces(corpus.training, size.sample_characters)), size.samples - held_out)
        unseen = _spread(list(pieces(corpus.held_out, size.sample_characters)), held_out)
        rows = [json.dumps({"text": text}) for text in (*training, *unseen)]
        (run.work / "text.jsonl").write_text("\n".join(rows))
        report.write_text(json.dumps(measured))
    return dict(json.loads(report.read_text()))


def make_continuations(run: Run, unseen: Sequence[Sample]) -> None:
    """`greedy.jsonl`: tokens of the verifier's greedy continuations of held-out texts' first tokens."""
    path = run.work / "greedy.jsonl"
    if path.exists():
        return
    size = run.size
    long_enough = [sample for sample in unseen if len(sample.token_ids) >= size.prompt_tokens]
    prompts = torch.stack([sample.token_ids[: size.prompt_tokens] for sample in long_enough[: size.prompts]])
    model: Any = AutoModelForCausalLM.from_pretrained(run.verifier, dtype=torch.bfloat16).to(run.device)
    with torch.inference_mode():
        prompts = prompts.to(run.device)
        found = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=size.new_tokens,
            min_new_tokens=size.new_tokens, do_sample=False,
        )  # fmt: skip
    mask = [0] * size.prompt_tokens + [1] * size.new_tokens
    path.write_text("\n".join(json.dumps({"input_ids": row, "loss_mask": mask}) for row in found.tolist()))


def said_of_mistake(run: Run, mistake: str) -> dict[str, str]:
    """What `headframe verify` says of a dataset with the mistake, by its option; a model that has learned little shows its head none."""
    job = run.job(mistake, {"source": str(run.work / "text.jsonl"), "limit": min(60, run.size.samples)})
    headframe("prepare", job)
    command([sys.executable, HERE / "mistaken_extract.py", mistake, job, "--shard", 0, "--port", 0])
    headframe("finalize", job)
    said = {}
    for option in ("--with-head", "--deep"):
        found = headframe("verify", run.output(mistake), option, expect=None)
        told = found.stderr if found.returncode == 65 else f"NOT SEEN: {found.stdout}"
        said[option] = told.strip().replace(f"{run.work}/", "")
    return said


def wrong_numbering(run: Run, output: Path) -> str:
    """What a training says that is given Headframe's own 0-based layers for speculators' ids; it must not begin."""
    layers = [str(layer) for layer in StatesDataset(output).manifest.states.layers]
    found = headframe(*train_arguments(run, output, run.work / "never"), "--target-layer-ids", *layers, expect=78)
    return found.stderr.strip().splitlines()[-1]


def train_arguments(run: Run, output: Path, save: Path) -> list[Any]:
    """Of `headframe train-with`; what it leaves out is filled in from the dataset, or is speculators' default."""
    size = run.size
    return [
        "train-with", "speculators", output, "--work", run.work / f"training-{save.name}", "--",
        "--speculator-type", "dflash", "--num-layers", size.draft_layers, "--block-size", size.block,
        "--max-anchors", size.anchors, "--total-seq-len", size.tokens_a_step, "--epochs", size.epochs,
        "--mask-token-id", mask_token(run), "--num-workers", min(4, os.cpu_count() or 1), "--save-path", save,
    ]  # fmt: skip


def train(run: Run, output: Path, seconds: float) -> None:
    """Train by speculators for at most so long; its log goes to train.log, its checkpoints to `drafter`."""
    if run.device.type == "cuda" and not (run.work / "drafter").exists():
        arguments = [*train_arguments(run, output, run.work / "drafter"), "--draft-attn-impl", "sdpa"]
        headframe(*arguments, expect=None, to=run.work / "train.log", seconds=seconds)


def logged(run: Run) -> list[dict[str, float]]:
    """What speculators' trainer logged: a record a step, and one a validation."""
    log = run.work / "train.log"
    lines = log.read_text().splitlines() if log.exists() else []
    records = [line for line in lines if "train/loss=" in line or "val/loss_epoch=" in line]
    return [{name: float(value) for name, value in re.findall(r"([\w/]+)=([-+.\w]+)", line)} for line in records]


@torch.inference_mode()
def acceptance(run: Run, checkpoint: Path, unseen: Sequence[Sample], greedy: Sequence[Sample]) -> dict[str, float]:
    """Of one checkpoint: `text` and `greedy` (see the module).

    `greedy_agreement` is how often the stored last state, normed and put through the head, chose the token that the verifier
    generated: 1 but for rounding, or states and tokens do not belong together.
    """
    config = SpeculatorModel.registry["dflash"].config_class.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"  # noqa: SLF001  (not in the checkpoint; see speculators' own loading)
    model = SpeculatorModel.registry["dflash"].from_pretrained(checkpoint, config=config).to(run.device).eval()
    accepted = torch.zeros(2, dtype=torch.float64)
    for sample in unseen:
        drafted, wanted, mask = drafts(model, sample, torch.ones_like(sample.loss_mask), run.device)
        found = compute_accepted_length_counts((drafted == wanted)[:, 1:], mask[:, 1:].bool())
        accepted += torch.stack(found).double().cpu()
    tokens = steps = 0
    agreed = []
    for sample in greedy:
        first = int(sample.loss_mask.argmax())
        places = torch.zeros_like(sample.loss_mask)
        places[first:] = 1
        drafted, wanted, _ = drafts(model, sample, places, run.device)
        own = sample.token_ids
        agreed.append((wanted[:, 1].cpu() == own[first + 1 : first + 1 + len(wanted)]).float().mean())
        place = first
        while place - first < len(drafted):
            following = own[place + 1 : place + model.block_size]
            run_length = int((drafted[place - first, 1:].cpu() == following).int().cumprod(0).sum())
            place, tokens, steps = place + run_length + 1, tokens + run_length + 1, steps + 1
    return {
        "text": float(accepted[0] / accepted[1]),
        "greedy": tokens / steps,
        "greedy_agreement": float(torch.stack(agreed).mean()),
    }


def drafts(
    model: Any, sample: Sample, places: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From each of A places [T] but the last ones a block: (drafted tokens, the verifier's own, mask), each [A, block]."""
    assert sample.last is not None
    length = len(sample.token_ids)
    loss_mask = places.unsqueeze(0).to(device)
    count = int(places[: length - model.block_size].sum())
    with torch.autocast(device.type, torch.bfloat16):
        _, logits, targets, mask, _ = model._backbone_forward(  # noqa: SLF001  (of 0.9.0: the forward but for its loss)
            sample.hidden_states.flatten(1).unsqueeze(0).to(device),
            sample.token_ids.unsqueeze(0).to(device),
            loss_mask,
            sample.last.unsqueeze(0).to(device),
            torch.zeros_like(loss_mask),
            max_anchors=count,
        )
    shape = (count, model.block_size)
    return logits.argmax(-1).view(shape), targets.argmax(-1).view(shape), mask.view(shape)


def headframe(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `headframe`; the options are those of `command`."""
    return command([*HEADFRAME, *arguments], **options)


def command(
    words: Sequence[Any], *, expect: int | None = 0, to: Path | None = None, seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it and insist on its exit code, None: any. With `to` its output goes there; `seconds` is the most it may take."""
    line = [str(word) for word in words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "20000", "TOKENIZERS_PARALLELISM": "false"}
    with (to or Path(os.devnull)).open("w") as file:
        streams: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT} if to else {"capture_output": True}
        try:
            found = subprocess.run(line, env=environment, text=True, check=False, timeout=seconds, **streams)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(line, 124, "", "")
    if expect is not None and found.returncode != expect:
        raise RuntimeError(
            f"{' '.join(line)}\nended with {found.returncode}, not {expect}:\n{found.stdout[-2000:]}{found.stderr[-4000:]}"
        )
    return found


def mask_token(run: Run) -> int:
    return int(PreTrainedTokenizerFast.from_pretrained(run.verifier).convert_tokens_to_ids(SPECIAL[1]))


def _spread(texts: list[str], count: int) -> list[str]:
    """`count` texts from all over the list."""
    assert len(texts) >= count, f"{len(texts)} texts, not {count}: a larger corpus is needed"
    return [texts[index * len(texts) // count] for index in range(count)]


def measure(run: Run, out: Path | None, train_seconds: float) -> None:
    """All steps in their order; what is known is printed, and written to `out`, at once."""
    run.work.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if run.device.type == "cuda" else platform.processor(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seconds": run.seconds,
    }

    def know(name: str, value: Any) -> None:
        print(f"{name}: {value}", flush=True)
        result[name] = value
        if out:
            out.write_text(json.dumps(result, indent=1))

    with run.timed("verifier"):
        know("verifier", make_verifier(run))
    with run.timed("extract"):
        headframe("run", run.job("text", {"source": str(run.work / "text.jsonl")}), "--quiet")
    dataset = StatesDataset(run.output("text"))
    know("states", {"layers": dataset.manifest.states.layers, "tokens": dataset.manifest.tokens})
    first_unseen = int(len(dataset) * 0.9)
    unseen = [dataset[index] for index in range(first_unseen, min(len(dataset), first_unseen + run.size.prompts))]

    # From here on nothing waits for another: the checks take minutes one after the other, mostly of starting Python.
    def checks(threads: ThreadPoolExecutor) -> None:
        text = run.output("text")
        said = {what: threads.submit(said_of_mistake, run, mistake) for mistake, what in MISTAKES.items()}
        numbering = threads.submit(wrong_numbering, run, text)
        right = threads.submit(headframe, "verify", text, "--with-head", "--json")
        untrained = threads.submit(
            headframe, *train_arguments(run, text, run.work / "untrained"), "--draft-attn-impl", "sdpa", "--dry-run"
        )
        make_continuations(run, unseen)
        headframe("run", run.job("greedy", {"source": str(run.work / "greedy.jsonl"), "format": "tokens"}), "--quiet")
        know("with_head", json.loads(right.result().stdout)["head"])
        know("mistakes", {what: found.result() for what, found in said.items()})
        know("layer ids one too low", numbering.result())
        untrained.result()

    with ThreadPoolExecutor() as threads:
        training = threads.submit(train, run, run.output("text"), train_seconds)
        with run.timed("checks, beside training"):
            try:
                checks(threads)
            except RuntimeError as error:  # training is worth its minutes all the same
                know("checks failed", str(error))
        with run.timed("training, after that"):
            training.result()
    records = logged(run)
    steps = [record for record in records if "global_step" in record]
    know("loss", {int(record["global_step"]): record["train/loss"] for record in steps})
    know("tokens_per_second", [record["profile/tokens_per_s"] for record in steps])
    validation = {int(record["epoch"]): record for record in records if "val/loss_epoch" in record}
    know("validation", validation)
    if not steps and (run.work / "train.log").exists():
        print((run.work / "train.log").read_text()[-6000:])
    last_step = {int(record["epoch"]): int(record["global_step"]) + 1 for record in steps}
    found = {0: run.work / "untrained"} | {last_step[epoch]: run.work / "drafter" / str(epoch) for epoch in validation}
    checkpoints = {step: path for step, path in found.items() if path.exists()}
    greedy_dataset = StatesDataset(run.output("greedy"))
    greedy = [greedy_dataset[index] for index in range(len(greedy_dataset))]
    accepted: dict[int, dict[str, float]] = {}
    with run.timed("acceptance"):
        for step in sorted(checkpoints, key=lambda each: (0 < each < max(checkpoints, default=0), each)):
            accepted[step] = acceptance(run, checkpoints[step], unseen, greedy)
            know("acceptance", accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--train-seconds", type=float, default=600.0, help="the most that training may take")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measure(Run(options.work, SIZES["tiny" if options.tiny else "h200"], device), options.out, options.train_seconds)


if __name__ == "__main__":
    main()
