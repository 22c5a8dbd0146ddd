"""Traffic that no router sends: each rule on both sides of its threshold, by hand."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from aurora import SyntheticOptions, synthetic_profile
from aurora.algorithms.workload import traffic_doubts as rules
from aurora.algorithms.workload.model_config import Shape
from aurora.algorithms.workload.traffic_doubts import load_doubts, traffic_doubts
from aurora.types import TokenRouting

DATA = Path(os.environ.get("AURORA_DATA", Path(__file__).parents[4] / "shared/data"))


def doubts(layers, experts, top_k, routing=None, load_LE=None):
    shape = Shape("m", layers, (), experts, top_k, 64, 32, 64, 3 * 64 * 32)
    counted = np.asarray(load_LE)[None, :, None] if routing is None else routing.tokens_TLSE(1, 1, experts)
    return traffic_doubts(shape.profile(counted, {}, routing))


@pytest.mark.parametrize(
    ("alike", "layers", "said"),
    [
        (96, 2, None),  # 96 of 640 is 15 %, which must be exceeded
        (97, 2, "97 of 640 tokens (15%) chose the same experts in all 2 layers (0, 1 in the first): padding? It is planned for as traffic"),
        (320, 1, None),  # in one layer many tokens may choose alike
    ],
)  # fmt: skip
def test_tokens_with_one_choice_in_every_layer(alike, layers, said):
    """All other tokens have one of 63 other rows of two pairs of the 16 experts, with their choices in either sequence."""
    row_U = np.where(np.arange(640) < alike, 0, 1 + np.arange(640) % 63)
    pair_UL = np.stack([row_U % 8, row_U // 8], axis=1)[:, :layers]
    first_UL = (np.arange(640) % 2)[:, None]
    chosen_ULK = np.stack([2 * pair_UL + first_UL, 2 * pair_UL + 1 - first_UL], axis=2)
    zeros_U = np.zeros(640, dtype=np.int64)
    found = doubts(layers, 16, 2, TokenRouting(chosen_ULK, zeros_U, zeros_U))
    assert found == (() if said is None else (said,))


@pytest.mark.parametrize(
    ("load_LE", "said"),
    [
        # top-1 of 4: padding of 30 % of the tokens gives an expert 0.3 + 0.7 / 4 = 0.475 of them in each layer, 76 of 160
        ([[75, 30, 32, 23], [30, 32, 75, 23]], None),
        ([[77, 30, 32, 21], [30, 32, 77, 21]], "by their counts, about 31% of all tokens chose the same experts in all 2 layers (0 in"),
        ([[77, 30, 32, 21], [30, 32, 75, 23]], None),
        # chi squared is 0 with three degrees of freedom; then (1 + 1) / (100 * 3/4) = 0.027, and chance leaves less in 0.1 % of cases
        ([[100, 100, 100, 100]], "experts have 100 to 100 tokens each, as even as by chance: is balance forced?"),
        ([[101, 99, 100, 100]], None),
        # (100 ** 2 + 100 ** 2) / 7500 = 2.67; shares vary by the root of (2.67 / 3 - 1 + 2 * 0.816) / 10,000 = 0.012 at most
        ([[10100, 9900, 10000, 10000]], "experts have 9900 to 1.01e+04 tokens each, as even as by chance"),
        ([[10600, 9400, 10000, 10000]], None),  # (96 / 3 - 1 + 1.63) / 10,000: 0.057
        ([[99, 90, 0, 110] + [100] * 12], None),  # one of 16 experts, and 93.7 choices in the mean
        ([[198, 180, 0, 220] + [200] * 12], "1 of 16 experts of all layers were never chosen, where the mean is 187 tokens: are"),
        ([[99, 90, 0, 0] + [100] * 12], "2 of 16 experts of all layers were never chosen, where the mean is 86.8 tokens: are"),
        ([[3, 0, 0, 5]], "2 of 4 experts of all layers were never chosen, where the mean is 2 tokens: too few tokens to"),
        ([[0, 0, 0, 0]], None),
    ],
)  # fmt: skip
def test_counts_of_experts(load_LE, said):
    found = doubts(len(load_LE), len(load_LE[0]), 1, load_LE=load_LE)
    assert bool(found) == bool(said)
    assert said is None or found[0].startswith(said)


def test_drawn_traffic_is_not_doubted():
    assert not traffic_doubts(synthetic_profile("zipf:4", "mixtral-topics", SyntheticOptions(sources=2)))
    assert not load_doubts(np.array([[7, 7]]), top_k=2)  # every token chooses both


@pytest.mark.skipif(not DATA.exists(), reason="recorded data is not here: set AURORA_DATA")
def test_recorded_traffic_is_not_doubted_at_half_the_thresholds(monkeypatch):
    """Tokens of DeepSeek-V2-Lite, all and a twentieth of them; counts of OLMoE and Mixtral by domain."""
    for name in ("MOST_ALIKE", "MOST_ALIKE_COUNTED"):
        monkeypatch.setattr(rules, name, getattr(rules, name) / 2)
    monkeypatch.setattr(rules, "LEAST_SPREAD", 2 * rules.LEAST_SPREAD)
    monkeypatch.setattr(rules, "MOST_UNCHOSEN", {least: part / 2 for least, part in rules.MOST_UNCHOSEN.items()})
    for name in ("law", "intent"):
        experts_ULK = np.load(DATA / f"dsv2lite_esft/{name}.npz")["experts"]
        for chosen_ULK in (experts_ULK, experts_ULK[::20]):
            zeros_U = np.zeros(len(chosen_ULK), dtype=np.int64)
            assert doubts(26, 64, 6, TokenRouting(chosen_ULK, zeros_U, zeros_U)) == ()
    with (DATA / "olmoe_mixtral_domains/counts_dev.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["selection"] == "topk"]
    for model, experts, top_k in (("olmoe-1b-7b-0924", 64, 8), ("mixtral-8x7b-v0.1", 8, 2)):
        for domain in ("arxiv", "book", "c4", "github", "wikipedia"):
            counts = [int(row["count"]) for row in rows if (row["model"], row["domain"]) == (model, domain)]
            assert doubts(3, experts, top_k, load_LE=np.reshape(counts, (3, experts))) == ()
