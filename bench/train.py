"""Losses of `aurora train` beside those of plain transformers and AdamW on one process: they must not depend on the ranks.

`python bench/train.py [--steps 50]` trains the shipped Mixtral in float64 on 1 to 4 ranks (threads, memory transport), with and
without replicas, with uneven shares and with experts that move, and writes
bench/results/train-DATE.md: how far the losses are apart at most.
"""

import argparse
from dataclasses import replace

import numpy as np
import torch
from machine import machine
from tables import Table, write
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from aurora.io import shipped
from aurora.models.own_weights import load_without_experts
from aurora.runtime.distributed.launcher import RankInfo, launch_threads
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.training.data import GlobalBatches, read_samples
from aurora.training.loss import Float64Throughout
from aurora.training.trainer import Trainer
from aurora.types import Cluster, Gpu, Placement, TrainOptions
from aurora.types.arrays import FloatArray

MODEL = shipped("models/mixtral-topics")
LAYERS, EXPERTS, TOP_K = 4, 8, 2
OPTIONS = TrainOptions(batch=5, length=24, dtype="float64", router_loss=0.02)
UNEVEN = Placement(
    (((0, 1, 2, 3), (0, 3, 4, 5), (0, 5, 6, 7)),) * LAYERS,
    (((0.7, 1.0, 1.0, 0.9), (0.3, 0.1, 1.0, 0.25), (0.0, 0.75, 1.0, 1.0)),) * LAYERS,
)


def plain(batches: GlobalBatches, steps: int) -> FloatArray:
    """Returns (steps, 3): loss, router loss and gradient norm of each step of one process without aurora."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64, experts_implementation="eager").eval()
    adam = torch.optim.AdamW(model.parameters(), OPTIONS.learning_rate, weight_decay=OPTIONS.weight_decay)
    found = []
    for step in range(steps):
        tokens = torch.from_numpy(batches.of(step))
        with Float64Throughout():
            out = model(input_ids=tokens, output_router_logits=True, use_cache=False)
        loss = cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        chance_NE = torch.cat(out.router_logits).softmax(dim=-1)  # transformers' own sum is in float32
        chosen_NE = torch.zeros_like(chance_NE).scatter_(1, chance_NE.topk(TOP_K).indices, 1.0)
        router = EXPERTS * (chosen_NE.mean(dim=0) * chance_NE.mean(dim=0)).sum()
        adam.zero_grad()
        (loss + OPTIONS.router_loss * router).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIONS.max_norm)
        adam.step()
        found.append((loss.item(), router.item(), norm.item()))
    return np.array(found)


def train_rank(
    rank_info: RankInfo, memory: Memory, options: TrainOptions, batches: GlobalBatches, placed: dict[int, Placement | None]
) -> FloatArray:
    """Returns the same of one rank; from the steps of `placed` on, experts are placed so (None: by their loads)."""
    trainer = Trainer(load_without_experts(MODEL, dtype=torch.float64), batches, options)
    transport = MemoryTransport(memory, rank_info.rank)
    transport.gather(torch.zeros(1, dtype=torch.uint8))
    ranks = rank_info.ranks
    trainer.join(transport, Cluster("bench", tuple(Gpu(f"g{rank}", "cpu", rank, 1e9, 1e9, 1) for rank in range(ranks))))
    found = []
    for step in range(options.steps):
        if step in placed:
            trainer.place(placed[step] or trainer.planned())
        prepared = trainer.prepare()
        trainer.commit(prepared)
        found.append((prepared.loss, prepared.router_loss, prepared.gradient_norm))
    return np.array(found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    samples_NT = read_samples(MODEL, [MODEL / "tokenizer.json"], OPTIONS.length)[:300]
    batches = GlobalBatches(samples_NT, OPTIONS.batch, OPTIONS.seed)
    expected = plain(batches, steps)
    losses = f"plain losses from {expected[0, 0]:.4f} to {expected[-1, 0]:.4f}"
    table = Table(
        "Largest differences from plain transformers and AdamW on one process",
        "ranks | experts | loss | router loss | gradient norm",
        f"{steps} steps of {batches.tokens} tokens in float64, {losses}. {machine()}.",
    )
    first = {0: None}
    ways: list[tuple[int, str, int, dict[int, Placement | None]]] = [
        *((ranks, "no replicas", 1, first) for ranks in (1, 2, 3, 4)),
        *((ranks, f"at least {least} replicas", least, first) for ranks, least in ((2, 2), (3, 2), (4, 2), (4, 3))),
        (3, "uneven shares", 1, {0: UNEVEN}),
        (3, "moved every 10 steps", 2, {step: UNEVEN if step % 20 else None for step in range(0, steps, 10)}),
    ]
    worst = 0.0
    for ranks, name, least, placed in ways:
        options = replace(OPTIONS, steps=steps, min_replicas=least)
        found = launch_threads(train_rank, ranks, Memory(ranks, 600.0), options, batches, placed, timeout_s=600.0)[0]
        apart = np.abs(found - expected).max(axis=0)
        worst = max(worst, float(apart[0]))
        table.add(ranks, name, *(f"{each:.1e}" for each in apart))
    table.lines.append(f"\nLargest difference of a loss: {worst:.1e}, {'within' if worst < 1e-9 else 'beyond'} 1e-9.")
    print(table.lines[-1])
    write("train", table.lines)


if __name__ == "__main__":
    main()
