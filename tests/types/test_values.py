"""Values refuse what they should not hold, and cannot be changed."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.types import Cluster, Curve, Gpu, Network, Order, Placement, Profile, Servers, TraceRecorder

FLAT = {p: Curve(np.array([1.0]), np.array([1.0])) for p in ("gate", "expert", "aggregate")}
GPU = {"name": "g", "kind": "k", "node": 0, "out_Bps": 1.0, "in_Bps": 1.0, "memory_bytes": 1}


def profile(tokens, **changed):
    fields = {"model": "m", "fingerprint": "", "tokens_TLSE": tokens, "top_k": 1, "dispatch_bytes": 1, "combine_bytes": 1,
              "expert_bytes": 1, "other_bytes": 1, "curves": {"k": FLAT}}  # fmt: skip
    return Profile(**{**fields, **changed})


@pytest.mark.parametrize("field", ["out_Bps", "in_Bps", "speed", "memory_bytes"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_gpus_need_positive_finite_figures(field, value):
    with pytest.raises(BadInput, match=f"gpu 'g': {field} must be a number above zero"):
        Gpu(**{**GPU, field: value})
    with pytest.raises(BadInput, match=f"{field} must lie between 1e-06 and 1e"):
        Gpu(**{**GPU, field: 10**400 if field == "memory_bytes" else 1e-320})


def test_a_cluster_without_gpus():
    with pytest.raises(BadInput, match="at least one"):
        Cluster("empty", ())


def test_servers_are_of_their_cluster():
    pair = Servers((0, 1), 1.0)
    assert Cluster("two", (Gpu(**GPU),) * 2, pair).servers is pair
    with pytest.raises(BadInput, match="cluster 'one': expected servers of 1 GPUs, found 2"):
        Cluster("one", (Gpu(**GPU),), pair)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.ones((1, 1, 1)), "expected 4 axes"),
        (np.ones((1, 1, 1, 1)), "expected integers, found float64"),
        (np.full((1, 1, 1, 1), -3), "zero or more, found -3"),
        (np.ones((1, 0, 1, 1), dtype=int), "is empty"),
    ],
)
def test_profiles_hold_counts(tokens, message):
    with pytest.raises(BadInput, match=message):
        profile(tokens)


@pytest.mark.parametrize("field", ["top_k", "dispatch_bytes", "combine_bytes", "expert_bytes", "other_bytes"])
@pytest.mark.parametrize("value", [1.5, -1, float("nan"), 2**62, True])
def test_profiles_hold_whole_sizes(field, value):
    with pytest.raises(BadInput, match=f"{field} must be a whole number from [01] to"):
        profile(np.ones((1, 1, 1, 2), dtype=int), **{field: value})


def test_more_bytes_than_64_bits_hold():
    with pytest.raises(BadInput, match="bytes travel in all, more than 64 bits hold"):
        profile(np.full((1, 1, 1, 2), 2**61))


def test_profiles_need_all_curves_and_a_top_k():
    ones = np.ones((1, 1, 1, 2), dtype=int)
    with pytest.raises(BadInput, match="lack aggregate"):
        profile(ones, curves={"k": {p: FLAT[p] for p in ("gate", "expert")}})
    with pytest.raises(BadInput, match="between 1 and its 2 experts, found 3"):
        profile(ones, top_k=3)


def test_arrays_are_copied_in_and_locked():
    tokens = np.ones((1, 1, 1, 1), dtype=np.int64)
    made = profile(tokens)
    tokens[:] = 5
    assert made.tokens_TLSE[0, 0, 0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        made.tokens_TLSE[:] = 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_arrays_stay_locked_in_copies_and_in_other_processes(copied):
    value = profile(np.ones((1, 1, 1, 2), dtype=np.int64))
    assert copied(value) == value
    assert not copied(value).tokens_TLSE.flags.writeable
    network = Network.equal(2)
    assert not network.pair_Bps_GG.flags.writeable
    assert not copied(network).pair_Bps_GG.flags.writeable


def test_the_digest_sees_every_input():
    base = profile(np.ones((1, 1, 1, 2), dtype=int))
    slower = {p: Curve(np.array([1.0]), np.array([2.0])) for p in FLAT}
    others = [
        profile(np.full((1, 1, 1, 2), 2)), profile(base.tokens_TLSE, dispatch_bytes=2), profile(base.tokens_TLSE, model="n"),
        profile(base.tokens_TLSE, curves={"k": slower}), profile(base.tokens_TLSE, curves={"other": FLAT}),
        profile(np.ones((1, 1, 2, 1), dtype=int)),
    ]  # fmt: skip
    assert len({p.digest for p in [base, *others]}) == len(others) + 1
    assert profile(base.tokens_TLSE).digest == base.digest
    assert [p.traffic_digest == base.traffic_digest for p in others] == [False] * 3 + [True] + [False] * 2


@given(st.lists(st.tuples(st.integers(1, 99), st.floats(0, 9)), min_size=1, max_size=5, unique_by=lambda p: p[0]))
def test_curves_pass_through_their_points_and_rise_beyond_them(points):
    points = sorted(points)
    curve = Curve(np.array([p[0] for p in points], dtype=float), np.array([p[1] for p in points]))
    assert np.allclose(curve([p[0] for p in points]), [p[1] for p in points])
    assert curve(0) == 0
    assert curve(1000) >= curve(points[-1][0]) - 1e-12


def test_a_curve_goes_on_with_its_last_slope():
    assert Curve(np.array([1.0, 3.0]), np.array([1.0, 2.0]))([2, 3, 7]).tolist() == [1.5, 2.0, 4.0]


def test_a_kinds_own_curve_beats_speed():
    fast = {p: Curve(np.array([1.0]), np.array([0.5])) for p in FLAT}
    made = profile(np.ones((1, 1, 1, 1), dtype=int), curves={"ref": FLAT, "fast": fast})
    assert made.seconds("expert", Gpu(**{**GPU, "kind": "fast", "speed": 9.0}), 1) == 0.5
    assert made.seconds("expert", Gpu(**{**GPU, "kind": "unknown", "speed": 4.0}), 1) == 0.25


@pytest.mark.parametrize(
    ("slots", "split", "message"),
    [
        ((((0,), (0,)),), None, r"layer 0: expected experts 0..0 once, found \[0, 0\]"),
        ((((0, 1), (3,)),), None, r"layer 0: expected experts 0..3 once, found \[0, 1, 3\]"),
        ((((0,), (1,)), ((0, 1), (1,))), None, r"layer 1: expected experts 0..1 once, found \[0, 1, 1\]"),
        ((), None, "expected one list of GPUs for every layer"),
        ((((0,), (0,)),), (((0.5,), (0.4,)),), "expected shares of zero or more that sum to 1"),
        ((((0,), (0,)),), (((1.5,), (-0.5,)),), "expected shares of zero or more that sum to 1"),
        ((((0, 0), ()),), (((0.5, 0.5), ()),), "expected no expert twice on a GPU"),
        ((((0,), (0,)),), (((0.5,), ()),), "expected a share for each slot"),
        ((((1,), (1,)),), (((0.5,), (0.5,)),), r"expected experts 0..1 once, found \[1, 1\]"),
    ],
)
def test_placements_hold_every_expert_once_or_in_shares(slots, split, message):
    with pytest.raises(BadInput, match=f"placement.*{message}"):
        Placement(slots, split)


def test_placement_tells_where_an_expert_is():
    assert Placement((((2, 0), (1,)),)).gpu_E(0).tolist() == [0, 1, 0]


def test_reversing_an_order_twice_gives_it_back():
    order = Order("x", np.array([[0, 1], [1, 0]]), 1, 3)
    assert order.reversed.pairs_X2.tolist() == [[0, 1], [1, 0]]
    assert (order.reversed.sends_open, order.reversed.recvs_open) == (3, 1)
    assert order.reversed.reversed.pairs_X2.tolist() == order.pairs_X2.tolist()


def test_a_recorder_sorts_by_start():
    recorder = TraceRecorder("measured", ("m",), 2)
    recorder.add(1, 0, 0, 0, "gate", 2.0, 3.0)
    recorder.add(0, 0, 0, 0, "dispatch", 0.5, 1.0, (1, True, 10))
    trace = recorder.trace()
    assert trace.start_s_X.tolist() == [0.5, 2.0]
    assert trace.seconds == 2.5
    assert TraceRecorder("measured", ("m",), 2).trace().seconds == 0.0


def test_a_placement_with_replicas_says_how_each_experts_load_divides():
    made = Placement((((1, 0), (0,)),), (((1.0, 0.25), (0.75,)),))
    assert (made.slots_LG, made.split_LG) == ((((0, 1), (0,)),), (((0.25, 1.0), (0.75,)),))
    assert made.split_EG(0).tolist() == [[0.25, 0.75], [1.0, 0.0]]
    assert Placement((((1, 0), (2,)),)).split_EG(0).tolist() == [[1, 0], [1, 0], [0, 1]]
    with pytest.raises(AssertionError):
        made.gpu_E(0)
