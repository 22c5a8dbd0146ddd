"""Traffic of Aurora's evaluation, which is not public: two models of 8 experts on two data sets, drawn or recorded.

Sizes and skews were fixed before any result was seen. The paper does not say how many tokens each model holds: `generated` and
`same-images` are two answers. A maker of traffic takes a random generator, and the folder of recorded data (None for none).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aurora.algorithms.workload.model_config import Shape
from aurora.errors import BadInput
from aurora.io.routing_dumps import read_dump
from aurora.types import Curve, Profile
from aurora.types.arrays import IntArray
from bench.papers.recorded_data import recorded_file

EXPERTS = 8  # as many source ranks: shard i sits with expert i
LAYERS = 4
MODELS = ("B/16", "B/32")
DATA_SETS = ("COCO", "ImageNet")

# A ViT-B layer: tokens of 768 half-precision numbers, experts of two 768 x 3072 matrices, a linear router, top-1.
HIDDEN, INNER = 768, 3072
TOKEN_BYTES = 2 * HIDDEN
# The paper gives no compute times. These are a layer's arithmetic on a middling GPU of 100 TFLOPS, the gate being the router
# alone (Aurora §2.1), which keeps exclusive utilisation below 20 % for most models, as its §8.2 reports.
FLOPS = 100e12
TOKEN_FLOPS = {"gate": 2 * HIDDEN * EXPERTS, "expert": 4 * HIDDEN * INNER, "aggregate": 2 * HIDDEN}

TOKENS = 8192  # of each source in one forward pass; without start-ups only proportions matter
SKEW = (0.4, 1.2)  # Zipf exponents of expert popularity, uniform, one per model, data set and layer
CONCENTRATION = 40.0  # Dirichlet: how close a source's own mix is to the popularity
PATCHES = {"B/16": 196, "B/32": 49}  # of one image of 224 x 224


@dataclass(frozen=True)
class Workload:
    """One draw of the traffic: one window, as many source ranks as experts, equal tokens per source."""

    profiles_DM: tuple[tuple[Profile, ...], ...]  # profiles_DM[d][m] is the profile of model m on data set d

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return self.profiles_DM[0][0].layers

    def pairs(self) -> Iterator[tuple[tuple[Profile, ...], int]]:
        """Yields (both models' profiles, layer) for each data set and layer: one bar of the colocated figures."""
        for profiles in self.profiles_DM:
            for layer in range(self.layers):
                yield profiles, layer


TrafficMaker = Callable[[np.random.Generator, Path | None], Workload]


def generated(rng: np.random.Generator, folder: Path | None) -> Workload:
    """Draws synthetic traffic with equally many tokens for both models. `folder` is not used.

    For every model, data set and layer, popularity is Zipf with an exponent from SKEW, and experts are shuffled. Each source
    draws its mix of experts from a Dirichlet around this popularity, and its tokens from a multinomial.
    """
    return _drawn(dict.fromkeys(MODELS, TOKENS), rng)


def _same_images(rng: np.random.Generator, folder: Path | None) -> Workload:
    """Draws traffic with equal images instead of equal tokens: B/16 cuts four times as many patches as B/32."""
    return _drawn({model: TOKENS * PATCHES[model] // PATCHES["B/16"] for model in MODELS}, rng)


def _drawn(tokens: dict[str, int], rng: np.random.Generator) -> Workload:
    def layer(count: int) -> IntArray:
        share_E = rng.permutation((1.0 + np.arange(EXPERTS)) ** -rng.uniform(*SKEW))
        mix_SE = rng.dirichlet(CONCENTRATION * share_E / share_E.sum(), size=EXPERTS)
        return rng.multinomial(count, mix_SE)

    return Workload(
        tuple(
            tuple(profile(f"{model} {data}", np.stack([layer(tokens[model]) for _ in range(LAYERS)])) for model in MODELS)
            for data in DATA_SETS
        )
    )


RECORDED_MODELS = {
    "olmoe-1b-7b-0924": Shape(
        "OLMoE-1B-7B-0924",
        layers=16,
        dense_layers=(),
        experts=64,
        top_k=8,
        hidden=2048,
        inner=1024,
        dispatched=2048,
        expert_weights=3 * 2048 * 1024,
    ),
    "mixtral-8x7b-v0.1": Shape(
        "Mixtral-8x7B-v0.1",
        layers=32,
        dense_layers=(),
        experts=8,
        top_k=2,
        hidden=4096,
        inner=14336,
        dispatched=4096,
        expert_weights=3 * 4096 * 14336,
    ),
}
RECORDED_SETS = {"prose": ("book", "c4", "wikipedia"), "technical": ("arxiv", "github")}
COUNTS = "olmoe_mixtral_domains/counts_dev.csv"


def recorded(rng: np.random.Generator, folder: Path | None) -> Workload:
    """Draws traffic in the same set-up from the recorded routing in `folder`.

    The models are OLMoE (64 experts, every eight neighbours folded to one) and Mixtral (8 experts), with top-k choices in the
    recorded layers 0, 7 and 15. Sources take the domains of a data set in turn, and each draws TOKENS choices from its domain.
    Token sizes and compute times are those of the paper's models.
    """
    layers, counts = _recorded_counts(folder)

    def drawn(model: str, domains: tuple[str, ...], layer: int) -> IntArray:
        share_SE = np.stack([counts[model, domains[s % len(domains)]][layer] for s in range(EXPERTS)])
        return rng.multinomial(TOKENS, share_SE / share_SE.sum(axis=1, keepdims=True))

    return Workload(
        tuple(
            tuple(
                profile(f"{model.split('-')[0]} {data}", np.stack([drawn(model, domains, layer) for layer in range(layers)]))
                for model in RECORDED_MODELS
            )
            for data, domains in RECORDED_SETS.items()
        )
    )


def _recorded_counts(folder: Path | None) -> tuple[int, dict[tuple[str, str], IntArray]]:
    """The number of recorded layers, and by model and domain (L, EXPERTS) counts, neighbouring experts folded."""
    path = recorded_file(folder, COUNTS)
    counts: dict[tuple[str, str], IntArray] = {}
    recorded_layers = set()
    for model, shape in RECORDED_MODELS.items():
        for domain in (domain for domains in RECORDED_SETS.values() for domain in domains):
            rows = {"model": model, "domain": domain, "selection": "topk"}
            try:
                found = read_dump(path, "csv", shape, rows)
            except BadInput as error:
                raise BadInput(f"recorded traffic cannot be read: {error}; `traffic` generated needs none") from None
            recorded_layers.add(found.layers)
            counts[model, domain] = found.counts_TLE.sum(axis=0).reshape(found.counts_TLE.shape[1], EXPERTS, -1).sum(axis=2)
    if len(recorded_layers) != 1:
        raise BadInput(f"{path}: expected the same layers of every model and domain, found {len(recorded_layers)} sets of them")
    return next(iter(counts.values())).shape[0], counts


TRAFFIC: dict[str, TrafficMaker] = {"generated": generated, "same-images": _same_images, "recorded": recorded}


def profile(name: str, tokens_LSE: IntArray) -> Profile:
    """Returns a profile with tokens_LSE (L, S, E): top-1, TOKEN_BYTES each way, compute times in proportion to tokens."""
    at = np.array([1.0, 1e6])
    curves = {phase: Curve(at, at * flops / FLOPS) for phase, flops in TOKEN_FLOPS.items()}
    return Profile(
        name,
        "",
        tokens_LSE[None],
        1,
        TOKEN_BYTES,
        TOKEN_BYTES,
        2 * 2 * HIDDEN * INNER,
        0,
        {"reference": curves},
        {"tool": "bench.papers.aurora"},
    )
