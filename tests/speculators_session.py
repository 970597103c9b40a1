"""What speculators' own code makes of a dataset; run by test_speculators.py in speculators' environment.

python speculators_session.py compare WORK DATASET EXPORT EXPORT_FLOAT8    rows, batches: through our backend and from files
python speculators_session.py train ARGUMENTS...                           20 steps of its trainer's loop, on the CPU
Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from typing import Any

import torch

import headframe_worker.trainers.speculators_backend as backend
from headframe_worker.reader import StatesDataset


def compare(work: str, uri: str, export: str, export_float8: str) -> dict[str, Any]:
    """Rows through ArrowDataset with each transfer, and packed by its collate."""
    from pathlib import Path

    from hs_connectors.transfer import FileTransfer, FP8Transfer
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn, SampleUnavailable

    transfer = pickle.loads(pickle.dumps(backend.HeadframeTransfer(StatesDataset(uri))))
    directories = {
        "backend": (work, transfer),
        "files": (export, FileTransfer(Path(export) / "hidden_states")),
        "float8": (export_float8, FP8Transfer(Path(export_float8) / "hidden_states")),
    }
    found = {
        name: ArrowDataset(1024, path, transfer=each, on_missing="skip", train_ratio=0.8, split=split)
        for split in ("train", "val")
        for name, (path, each) in {f"{key} {split}": value for key, value in directories.items()}.items()
    }
    rows, missing, worst = 0, 0, 0.0
    for split in ("train", "val"):
        ours, files, float8 = (found[f"{name} {split}"] for name in directories)
        for index in range(len(ours)):
            one, two, three = ours[index], files[index], float8[index]
            if isinstance(one, SampleUnavailable):
                assert isinstance(two, SampleUnavailable)
                missing += 1
                continue
            assert set(one) == set(two)
            assert all(torch.equal(one[key], two[key]) and one[key].dtype == two[key].dtype for key in one)
            error = (three["hidden_states"].float() - one["hidden_states"].float()).norm() / one[
                "hidden_states"
            ].float().norm()
            worst = max(worst, float(error))
            rows += 1
        width = ours[0]["verifier_last_hidden_states"].shape[1]
        layers = ours[0]["hidden_states"].shape[1] // width
        for preprocess in (None, shift_batch):
            collate = CollateFn(512, width, layers, preprocess=preprocess)
            batches = [collate([dataset[index] for index in range(len(dataset))]) for dataset in (ours, files)]
            assert all(
                torch.equal(batches[0][key], batches[1][key]) for key in batches[0] if torch.is_tensor(batches[0][key])
            )
    return {"rows": rows, "missing": missing, "worst_float8_error": worst}


def train(arguments: list[str]) -> dict[str, Any]:
    """The steps of speculators' Trainer, which itself needs a CUDA device: its models, loaders, loss and arguments are its own."""
    from hs_connectors.transfer import HiddenStatesBackend
    from speculators.model import SpeculatorModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.cli import build_draft_model, parse_vocab_mappings
    from speculators.train.config import TrainConfig
    from speculators.train.dataloader import create_train_val_loaders

    args = argparse.Namespace(**TrainConfig.resolve(arguments).flatten())
    torch.manual_seed(0)
    d2t, t2d, vocabulary = parse_vocab_mappings(args)
    model_class = SpeculatorModel.registry[args.speculator_type]
    model = build_draft_model(args, model_class, t2d, d2t, vocabulary)
    transfer = HiddenStatesBackend.registry[args.hidden_states_backend].from_train_args(args, args.data_path)
    loader, _ = create_train_val_loaders(
        data_path=args.data_path,
        total_seq_len=args.total_seq_len,
        hidden_states_dtype=getattr(torch, args.hidden_states_dtype),
        transfer=transfer,
        vllm_endpoint=args.vllm_endpoint,
        on_missing=args.on_missing,
        verifier_name_or_path=args.verifier_name_or_path,
        request_timeout=args.request_timeout,
        max_retries=args.max_retries,
        generation_validation_retries=args.generation_validation_retries,
        max_consecutive_generation_failures=args.max_consecutive_generation_failures,
        hidden_size=model.config.transformer_layer_config.hidden_size,
        num_target_layers=len(model.target_layer_ids),
        num_workers=args.num_workers,
        prefetch_factor=args.prefetch_factor,
        preprocess=shift_batch if args.speculator_type == "eagle3" else None,
        train_data_ratio=args.train_data_ratio,
        seed=args.seed,
    )
    options, _ = model_class.get_trainer_kwargs(**vars(args))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    losses: list[float] = []
    model.train()
    while len(losses) < args.max_steps:
        for batch in loader:
            tensors = {key: value for key, value in batch.items() if torch.is_tensor(value)}
            _, loss, _ = model(**tensors, **options)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    return {"losses": losses, "target_layer_ids": list(model.target_layer_ids)}


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    print(json.dumps(compare(*rest) if kind == "compare" else train(rest)))
