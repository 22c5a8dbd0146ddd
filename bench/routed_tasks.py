"""Recorded and drawn routing of tasks (domains of traffic), token by token: what a plan is made from, and what it then serves.

DeepSeek-V2-Lite's two tasks are tokens in sequence as recorded. Of OLMoE's and Mixtral's tasks only counts were recorded: their
tokens are these counts in random order, so that windows differ by chance alone. The drifting source is drawn.
"""

import csv
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aurora.algorithms.workload.model_config import Shape
from aurora.types import PHASES, Curve, Profile, TokenRouting

ROOT = Path(__file__).parents[1]
RECORDED = Path(os.environ.get("AURORA_DATA", ROOT.parent / "shared" / "data"))
SEQUENCE = 64  # tokens, where sequences were not recorded
LEAST_WINDOW, MOST_WINDOWS = 32, 12  # tokens of a window, windows of a profile

DEEPSEEK = {
    "model_type": "deepseek_v2", "num_hidden_layers": 1, "n_routed_experts": 64, "num_experts_per_tok": 6, "hidden_size": 2048,
    "moe_intermediate_size": 1408,
}  # fmt: skip
OLMOE = {
    "model_type": "olmoe", "num_hidden_layers": 1, "num_experts": 64, "num_experts_per_tok": 8, "hidden_size": 2048,
    "intermediate_size": 1024,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 4096,
    "intermediate_size": 14336,
}  # fmt: skip
DRIFTING = {
    "model_type": "drifting", "num_hidden_layers": 1, "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048,
    "intermediate_size": 768,
}  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """Tokens in sequence: the experts of each, (U, L, K), and the number of its sequence (U,)."""

    experts_ULK: np.ndarray
    sequence_U: np.ndarray

    def __len__(self) -> int:
        return len(self.experts_ULK)

    def at(self, tokens: Any) -> "Traffic":
        """The tokens at some positions."""
        return Traffic(self.experts_ULK[tokens], self.sequence_U[tokens])

    def loads_LE(self, experts: int) -> np.ndarray:
        return np.stack([np.bincount(self.experts_ULK[:, at].ravel(), minlength=experts) for at in self.layers])

    @property
    def layers(self) -> range:
        return range(self.experts_ULK.shape[1])

    def windows(self) -> list["Traffic"]:
        """Stretches of consecutive tokens, equally long."""
        windows = int(np.clip(len(self) // LEAST_WINDOW, 1, MOST_WINDOWS))
        return [self.at(part) for part in np.array_split(np.arange(len(self)), windows)]


@dataclass(frozen=True)
class Source:
    """A model and its tasks."""

    name: str
    config: dict[str, Any]
    tasks: dict[str, Traffic]

    @property
    def experts(self) -> int:
        return Shape.of(self.config).experts

    @property
    def middle_layer(self) -> "Source":
        """The source with one layer."""
        tasks = {
            name: Traffic(each.experts_ULK[:, len(each.layers) // 2, None], each.sequence_U)
            for name, each in self.tasks.items()
        }
        return replace(self, tasks=tasks)

    def profile(self, traffic: Traffic, ranks: int) -> Profile:
        """The traffic's windows as a profile of the model's shape; its sequences go to the ranks in turn.

        Compute times are in proportion to tokens, so that what is planned for and what is judged are both load.
        """
        rank_U = np.unique(traffic.sequence_U, return_inverse=True)[1] % ranks
        windows = np.split(rank_U, np.cumsum([len(each) for each in traffic.windows()])[:-1])
        tokens_TLSE = np.zeros((len(windows), len(traffic.layers), ranks, self.experts), dtype=np.int64)
        for window, (each, own_U) in enumerate(zip(traffic.windows(), windows, strict=True)):
            for layer in traffic.layers:
                cell_UK = own_U[:, None] * self.experts + each.experts_ULK[:, layer]
                tokens_TLSE[window, layer].flat += np.bincount(cell_UK.ravel(), minlength=ranks * self.experts)
        made = replace(Shape.of(self.config), layers=len(traffic.layers)).profile(tokens_TLSE, {})
        curves = {
            kind: {phase: Curve([0.0, by_phase[phase].tokens_X[-1]], [0.0, by_phase[phase].seconds_X[-1]]) for phase in PHASES}
            for kind, by_phase in made.curves.items()
        }
        return replace(made, curves=curves)

    def routed(self, traffic: Traffic, ranks: int) -> Profile:
        """The traffic as one window with every token's choices; its sequences go to the ranks in turn."""
        rank_U = traffic.sequence_U % ranks
        routing = TokenRouting(traffic.experts_ULK, rank_U, np.zeros(len(traffic), dtype=np.int64))
        tokens_TLSE = routing.tokens_TLSE(1, ranks, self.experts)
        return replace(Shape.of(self.config), layers=len(traffic.layers)).profile(tokens_TLSE, {}, routing)


def deepseek(layers: list[int]) -> Source | None:
    """DeepSeek-V2-Lite's two tasks, in some of its 26 layers; None where they are absent."""
    tasks = {}
    for file in sorted((RECORDED / "dsv2lite_esft").glob("*.npz")):
        with np.load(file) as found:
            sequence_U = np.repeat(np.arange(len(found["seq_len"])), found["seq_len"])
            tasks[file.stem] = Traffic(found["experts"][:, layers], sequence_U)
    return Source("DeepSeek-V2-Lite", DEEPSEEK, tasks) if tasks else None


def counted(name: str, config: dict[str, Any], file: str, layers: list[int], only: dict[str, str]) -> Source | None:
    """Tasks of which counts were recorded, in a file's rows of `layers` that have the values `only`; None if it is absent."""
    path = RECORDED / file
    if not path.exists():
        return None
    shape = Shape.of(config)
    count: dict[str, np.ndarray] = {}
    with path.open() as rows:
        for row in csv.DictReader(rows):
            if int(row["layer"]) in layers and all(row[key] == value for key, value in only.items()):
                load_LE = count.setdefault(
                    row.get("domain") or row["subject"], np.zeros((len(layers), shape.experts), np.int64)
                )
                load_LE[layers.index(int(row["layer"])), int(row["expert"])] = int(row["count"])
    rng = np.random.default_rng(0)
    tasks = {}
    for task, load_LE in count.items():
        tokens = int(load_LE.sum(axis=1).min()) // shape.top_k
        drawn_LX = [rng.permutation(np.repeat(np.arange(shape.experts, dtype=np.uint8), load_E)) for load_E in load_LE]
        experts_LUK = np.stack([drawn_X[: tokens * shape.top_k].reshape(tokens, shape.top_k) for drawn_X in drawn_LX])
        tasks[task] = Traffic(experts_LUK.swapaxes(0, 1), np.arange(tokens) // SEQUENCE)
    return Source(name, config, tasks)


def drifting(layers: int, tasks: int, tokens: int) -> Source:
    """Tasks that follow in time, while the experts' popularity, Zipf 0.8, wanders.

    It is an Ornstein-Uhlenbeck walk (log deviation 1, memory one task). Each sequence has tastes besides (log deviation 0.5).
    """
    shape = Shape.of(DRIFTING)
    rng = np.random.default_rng(0)
    base_LE = -0.8 * np.log1p(rng.permuted(np.tile(np.arange(shape.experts), (layers, 1)), axis=1))
    walk_LE = rng.normal(size=base_LE.shape)
    sequences = tokens // SEQUENCE
    keep = np.exp(-1 / sequences)
    chosen: list[np.ndarray] = []
    for _ in range(tasks * sequences):
        walk_LE = keep * walk_LE + np.sqrt(1 - keep**2) * rng.normal(size=base_LE.shape)
        taste_LE = base_LE + walk_LE + rng.normal(scale=0.5, size=base_LE.shape)
        luck_ULE = taste_LE + rng.gumbel(size=(SEQUENCE, *base_LE.shape))
        chosen.append(np.argpartition(-luck_ULE, shape.top_k, axis=2)[:, :, : shape.top_k].astype(np.uint8))
    whole = Traffic(np.concatenate(chosen), np.arange(len(chosen) * SEQUENCE) // SEQUENCE)
    length = sequences * SEQUENCE
    return Source(
        "drifting", DRIFTING, {f"time {task}": whole.at(slice(task * length, (task + 1) * length)) for task in range(tasks)}
    )
