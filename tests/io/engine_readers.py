"""What serving engines make of a placement's file: their readers, written again from their sources, with their checks.

Each takes the file's text and the engine's settings, and returns for every layer that it reads the experts in each GPU's slots.
"""

import json

import numpy as np
import yaml


def by_gpu(row, gpus):
    return np.array(row).reshape(gpus, -1).tolist()


def sglang(text, numbers, decoder_layers, experts, gpus, redundant):
    """srt/eplb/expert_location.py, v0.5: `init_by_mapping(**data)`, then a map of every decoder layer."""
    data = json.loads(text)
    assert set(data) == {"physical_to_logical_map"}, "init_by_mapping takes no other argument"
    physical_LP = np.array(data["physical_to_logical_map"])
    assert physical_LP.shape == (decoder_layers, experts + redundant)  # _init_common, and lookups by the model's layer number
    assert (experts + redundant) % gpus == 0
    for row in physical_LP:
        places = [[] for _ in range(experts)]
        for physical, logical in enumerate(row):
            places[logical].append(physical)
        for candidates in places:
            divmod(gpus, len(candidates))  # _fair_choices
    return [by_gpu(physical_LP[layer], gpus) for layer in numbers]


def eplb(text, numbers, decoder_layers, experts, gpus, redundant):
    """eplb.py: what `rebalance_experts` returns, by MoE layer: maps there and back, -1 where there is no replica."""
    data = json.loads(text)
    phy2log, log2phy, logcnt = (np.array(data[name]) for name in ("phy2log", "log2phy", "logcnt"))
    assert phy2log.shape == (len(numbers), experts + redundant)
    assert log2phy.shape == (len(numbers), experts, logcnt.max())
    for layer in range(len(numbers)):
        assert (np.bincount(phy2log[layer], minlength=experts) == logcnt[layer]).all()
        for expert in range(experts):
            held = [slot for slot in log2phy[layer, expert] if slot >= 0]
            assert (phy2log[layer, held] == expert).all()
            assert len(held) == logcnt[layer, expert] > 0
    assert phy2log.shape[1] % gpus == 0  # num_replicas
    return [by_gpu(row, gpus) for row in phy2log]


def trtllm(text, numbers, decoder_layers, experts, gpus, redundant):
    """llmapi/llm_args.py and fused_moe, v1.2: `MoeLoadBalancerConfig`, asked for each MoE layer by the model's number."""
    config = yaml.safe_load(text)
    assert set(config) <= {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}, "the model forbids more"
    slots = config["num_slots"]
    assert slots == experts + redundant
    assert slots % gpus == 0
    found = []
    for layer in numbers:
        row = config["initial_global_assignments"][layer]
        assert isinstance(row, list)
        assert len(row) == slots
        assert set(row) == set(range(experts))
        found.append(by_gpu(row, gpus))
    return found


def vllm_ascend(text, numbers, decoder_layers, experts, gpus, redundant):
    """eplb/core/eplb_utils.py, v0.23: `init_eplb_config` of the n-th MoE layer, and where `log2phy` sends a rank's tokens."""
    data = json.loads(text)
    found = []
    for layer in range(len(numbers)):
        assert layer < data["moe_layer_count"]
        rows = [device["device_expert"] for device in data["layer_list"][layer]["device_list"]]
        placement_GP = np.array(rows)  # torch.tensor: rows of one length
        assert placement_GP.ndim == 2
        assert placement_GP.size - experts == redundant  # "Ensure vLLM and Ascend use the same redundant expert count"
        map_GE = np.full((gpus, experts), -1)
        for rank in range(gpus):
            map_GE[rank, placement_GP[rank]] = np.arange(placement_GP.shape[1])
        slots = (map_GE[0] != -1).sum()
        places = {}
        for rank in range(gpus):
            for expert in np.flatnonzero(map_GE[rank] != -1):
                places.setdefault(int(expert), []).append(int(map_GE[rank, expert] + rank * slots))
        assert sorted(places) == list(range(experts))  # scattered into a tensor of that length
        for rank in range(gpus):
            for expert, replicas in places.items():
                assert placement_GP.ravel()[replicas[rank % len(replicas)]] == expert
        found.append(placement_GP.tolist())
    return found


def vllm(text, numbers, decoder_layers, experts, gpus, redundant):
    """distributed/eplb/eplb_state.py of pull request 41141: `_load_initial_mapping`, by MoE layer."""
    records = [json.loads(line) for line in text.splitlines() if line.strip()]
    record = next(each for each in records if each["record_type"] == "eplb_initial_mapping")
    assert record["version"] == 1
    assert record["num_redundant_experts"] == redundant
    assert record["num_slots"] == experts + redundant
    rows = record["initial_global_assignments"]
    assert set(rows) == {str(layer) for layer in range(len(numbers))}
    for row in rows.values():
        assert len(row) == record["num_slots"]
        assert set(row) == set(range(experts))
    return [by_gpu(rows[str(layer)], gpus) for layer in range(len(numbers))]


def vllm_list(text, numbers, decoder_layers, experts, gpus, redundant):
    """Pull requests 49572 and 53022: a list of physical experts for each MoE layer, or one list for all."""
    rows = json.loads(text)
    assert [len(row) for row in rows] == [experts + redundant] * len(numbers)
    assert all(set(row) == set(range(experts)) for row in rows)
    return [by_gpu(row, gpus) for row in rows]


READERS = {
    "vllm-list": vllm_list,
    "sglang": sglang,
    "eplb": eplb,
    "trtllm": trtllm,
    "vllm-ascend": vllm_ascend,
    "vllm-map": vllm,
}
