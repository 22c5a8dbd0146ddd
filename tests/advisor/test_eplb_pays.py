"""Whether EPLB pays: costs of a rearrangement beside published ones, lives by hand, and traffic whose answer is known."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.advisor.best_way import best_way
from aurora.advisor.eplb_pays import least_life_s, rearrangement_s
from aurora.advisor.recommend import recommend
from aurora.advisor.served_ways import compare_ways_of_serving
from aurora.algorithms.workload.model_config import Shape
from aurora.io import load_gpus
from aurora.reports.advice import eplb_line, recommendation_lines
from aurora.types import RequestLoad
from tests.advisor.test_served_ways import CONFIG, H100, ONE_SERVER, traffic


def test_a_stall_must_be_served_for():
    assert least_life_s(41.8, 0.0645) == pytest.approx(648, abs=0.1)  # vLLM's pull request 50647: (1466.5 - 463.1) / 24 s
    assert least_life_s(41.8, 1 - 0.9356 / 0.9919) == pytest.approx(736, abs=1)  # from balancedness 0.9356 to 0.9919
    assert least_life_s(1.0, 0.0) == least_life_s(1.0, -0.1) == np.inf


@pytest.mark.parametrize(
    ("slots", "layers", "expert_bytes", "kind", "computed", "measured"),
    [
        # 9 x 58 slots of 3 x 7168 x 2048 x 4.5 / 8 B: 522 x (24.77e6 / (0.7 x 900e9) + 1.5e-3) s; pull request 43219
        (9, 58, 24_772_608, "NVIDIA GB200", 0.804, (0.65, 1.70)),
        # 8 x 26 slots of 3 x 2048 x 1408 x 2 B: 208 x (17.3e6 / (0.7 x 450e9) + 1.5e-3) s; pull request 28369
        (8, 26, 17_301_504, "NVIDIA H100 80GB HBM3", 0.323, (0.26, 0.42)),
    ],
)
def test_a_rearrangement_takes_about_as_long_as_published_ones(slots, layers, expert_bytes, kind, computed, measured):
    gpu = load_gpus()[kind]
    found = rearrangement_s(slots, layers, expert_bytes, gpu, 0.7 * gpu.port_Bps, waits=True)
    assert found == pytest.approx(computed, abs=0.001)
    assert measured[0] <= found <= measured[1]
    copied = rearrangement_s(slots, layers, expert_bytes, gpu, 0.7 * gpu.port_Bps, waits=False)
    assert copied == pytest.approx(slots * layers * 2 * expert_bytes / (0.83 * gpu.memory_Bps))  # read and written


def drifting():
    """Half of the experts are hot, and in each fifth of the windows another half: pairs that are even in four are not in the fifth."""
    masks_W = np.repeat([1, 2, 4, 8, 15], 8)
    share_WE = np.array(
        [[6.0 if (expert & mask).bit_count() % 2 else 1.0 for expert in range(16)] for mask in masks_W.tolist()]
    )
    rng = np.random.default_rng(0)
    tokens_TLSE = np.stack([rng.multinomial(1 << 17, share_E / share_E.sum(), size=(4, 8)) for share_E in share_WE])
    return Shape.of(CONFIG).profile(tokens_TLSE, {"tool": "recorder"}, kinds=[H100])


@pytest.mark.parametrize(
    ("profile", "stall_s", "advice"),
    [(traffic(), 1.0, "map"), (traffic(hot=1.0), 1.0, "off"), (drifting(), 1e-6, "eplb"), (drifting(), 1e3, "off")],
    ids=["stays", "even", "drifts", "drifts, but moves take too long"],
)
def test_a_map_eplb_or_neither(profile, stall_s, advice):
    model = replace(ONE_SERVER, load=RequestLoad(isl=4096, osl=8, concurrency=2), eplb_stall_s=stall_s)  # prompts, most of all
    compared = compare_ways_of_serving(profile, model, "vllm", 8)
    answer, best = compared.eplb, best_way(compared)
    assert answer.advice == advice
    assert answer.drift
    assert advice == "eplb" or best is None or best.way.eplb is None
    if advice != "off" or stall_s == 1e3:
        assert answer.life_s == pytest.approx(stall_s / answer.saved)
        assert answer.interval in {other.way.eplb.interval for other in compared.others if other.way.eplb}
        assert answer.interval >= 4  # a layer a step
    assert eplb_line(answer).startswith({"off": "EPLB: switch it off", "map": "EPLB: leave", "eplb": "EPLB: use"}[advice])


def test_a_server_that_eplb_made_three_times_slower_is_told_to_switch_it_off():
    """Report 92: 32 experts in sequence on 16 GPUs, 1069 tokens on the first and 995 or 996 on the others; 41.8 s a move."""
    config = {**CONFIG, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 2, "moe_intermediate_size": 768}
    load_E = np.array([535, 534, *[498] * 13, 497, 498, *[497, 498] * 7, 497])
    tokens_TLSE = np.zeros((1, 2, 16, 32), dtype=np.int64)
    tokens_TLSE[0, :, 0] = load_E
    profile = Shape.of(config).profile(tokens_TLSE, {"tool": "recorder"}, kinds=[H100])
    found = recommend("h100:16", "vllm", model=config, profile=profile, eplb_stall_s=41.8)
    answer = found.served.eplb
    assert (answer.advice, answer.drift, answer.given) == ("off", False, True)
    assert answer.balancedness == pytest.approx(1000 / 1069)
    assert answer.experts_life_s == pytest.approx(41.8 / (1 - 1000 / 1069))  # 648 s
    assert answer.life_s > answer.experts_life_s
    said = " ".join(recommendation_lines(found))
    assert said.index("EPLB: switch it off") < said.index("one recording shows no drift") < said.index("648 s would do")
