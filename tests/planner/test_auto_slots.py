"""Slots per GPU by default: room beside a KV cache, traffic kept aside, and replicas where they pay."""

from dataclasses import replace

import numpy as np
import pytest

import aurora
from aurora.algorithms.gpu_slots import SlotRoom
from aurora.algorithms.workload.step_traffic import set_aside
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput
from aurora.io import load_profile, save
from aurora.planner.plan import make_plan
from aurora.planner.slots import worthwhile_slots
from aurora.types import Cluster, Gpu, PlanOptions, Profile, SyntheticOptions

CONFIG = {
    "num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
EXPERT_BYTES = 2 * 3 * 64 * 64 * 2  # of both layers, at half precision
CACHED_BYTES = 2 * 2 * (2 * 2 * 16)  # keys and values of a token in both layers


def machines(memory_bytes: int, gpus: int = 4) -> Cluster:
    return Cluster("c", tuple(Gpu(f"g{rank}", "a", rank, 1e6, 1e6, memory_bytes) for rank in range(gpus)))


def traffic(skew: str = "zipf:1.2", **options) -> Profile:
    return draw_profile(skew, CONFIG, SyntheticOptions(sources=4, window_tokens=256, **options))


def test_room_is_what_memory_holds_beside_weights_activations_and_cache():
    source = traffic()
    activations = 2 * 2 * 256 * (128 + 128)  # sent and received: top-2 of 256 tokens, rows of 64 numbers there and back
    assert source.kv_bytes == CACHED_BYTES
    for spare in (0, 3, 40):
        usable = source.other_bytes + activations + (2 + spare) * EXPERT_BYTES
        on = machines(-(-usable * 10 // 9))
        room = SlotRoom.of(on, source, PlanOptions())
        assert (room.slot_bytes, room.activation_bytes) == (EXPERT_BYTES, activations)
        assert room.slots == 2 + spare // 10  # a tenth of the cache that fits without replicas
        assert room.cache_tokens == pytest.approx(0.9 * spare * EXPERT_BYTES / CACHED_BYTES, abs=1)
        assert f"KV cache for {room.cache_tokens:,} tokens" in str(room)
        assert len(str(room)) < 130  # without the formula, which is in the docs
    unknown = replace(source, kv_bytes=None)
    assert SlotRoom.of(on, unknown, PlanOptions()).slots == room.slots
    assert "KV cache (bytes of a token unknown)" in str(SlotRoom.of(on, unknown, PlanOptions()))
    assert SlotRoom.of(machines(10**12), source, PlanOptions()).slots == source.experts  # each once


@pytest.mark.parametrize(
    "options", [{"windows": 1}, {"windows": 7}, {"windows": 10, "token_level": True}, {"token_level": True}]
)
def test_traffic_is_kept_aside_whole(options):
    source = traffic(**options)
    planned, aside, _ = set_aside(source, 0)
    assert (planned.load_LE + aside.load_LE == source.load_LE).all()
    assert planned.tokens_TLSE.any()
    assert aside.tokens_TLSE.any()
    if source.windows > 1:
        windows = [list(map(bytes, each.tokens_TLSE)) for each in (planned, aside, source)]
        assert sorted(windows[0] + windows[1]) == sorted(windows[2])
    else:
        assert 0.4 < aside.load_LE.sum() / source.load_LE.sum() < 0.6
    assert (planned.routing is None) == (aside.routing is None) == (source.routing is None)


@pytest.mark.parametrize(
    ("seconds", "room", "expected", "more"),
    [
        ({None: 100, 3: 90, 4: 85, 5: 84.9}, 8, 4, 0.1 / 85),  # 5 saves too little
        ({None: 100, 3: 90, 4: 85, 5: 70}, 4, 4, 15 / 85),  # no room for 5 beside the cache
        ({None: 100, 3: 99.5, 4: 50}, 8, None, 0.005),
        ({None: 100}, 2, None, None),
        ({None: 100, **{slots: 100 - 10 * slots for slots in range(3, 9)}}, 8, 8, None),  # every GPU holds all experts
    ],
)
def test_a_further_slot_is_taken_while_it_saves_more_than_a_hundredth(seconds, room, expected, more):
    on, source = machines(10**9), traffic()
    slots = worthwhile_slots(replace(SlotRoom.of(on, source, PlanOptions()), slots=room), on, source, seconds.__getitem__, "a")
    assert slots.per_gpu == expected
    assert slots.more_gain == (None if more is None else pytest.approx(more))
    told = "one fewer would take" if (expected or 0) > 3 else "no replicas would take" if expected else "held once"
    assert told in slots.notes[-1]


def test_replicas_are_taken_where_there_is_room_and_they_pay():
    source = traffic()
    chosen = aurora.plan(machines(10**9), source)
    asked = PlanOptions(slots_per_gpu=chosen.options.slots_per_gpu)
    assert asked.slots_per_gpu in (3, 4)
    same = make_plan(machines(10**9), [source], asked)
    assert chosen == replace(same, notes=chosen.notes, slot_gain=chosen.slot_gain)
    held = aurora.plan(machines(10**9), source, PlanOptions(slots_per_gpu=None))
    assert chosen.objective_s < held.objective_s
    assert any("drawn traffic" in note and " would take" in note for note in chosen.notes)
    assert any("KV cache for" in note for note in chosen.notes)


def test_plans_stay_as_they_are_without_room_without_gain_and_where_options_decide():
    even = Profile("m", "", np.full((6, 2, 4, 8), 25), 2, 100, 100, 10, 0, traffic().curves)
    tight = machines(traffic().other_bytes + 3 * EXPERT_BYTES)
    for on, source, options in (
        (tight, traffic(), PlanOptions()),  # memory, but none beside what a tenth of the cache frees
        (machines(10**9), even, PlanOptions()),
        (machines(10**9), traffic(), PlanOptions(place="swap-search")),
        (machines(10**9), traffic(), PlanOptions(assign="exact")),
    ):
        found, held = aurora.plan(on, source, options), make_plan(on, [source], options)
        assert found.options.slots_per_gpu is None
        assert found == replace(held, notes=found.notes, slot_gain=found.slot_gain)


def test_a_profile_keeps_the_bytes_of_a_token(tmp_path):
    source = traffic()
    save(source, tmp_path / "p.npz")
    assert load_profile(tmp_path / "p.npz") == source
    assert source.digest == replace(source, kv_bytes=None).digest
    with pytest.raises(BadInput, match="expected kv_bytes of zero or more"):
        replace(source, kv_bytes=-1.0)
