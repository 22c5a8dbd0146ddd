"""Ranks' records: what was counted is in the profile, whatever the windows, and timings become curves."""

import numpy as np
import pytest
import torch
from aurora_vllm.traffic_recorder import MAX_WINDOWS, PENDING_LIMIT, ChoiceCounts, EngineFacts, Span, TrafficRecorder
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.io import load_profile, save
from aurora.io.plugin_records import save_record
from aurora.profiler.merge_records import load_records, merged, not_negative

FACTS = {"model": "tiny", "fingerprint": "f", "engine": "vllm 0.32", "kind": "cpu", "top_k": 2, "layers": 2, "experts": 4}
FACTS |= {"dispatch_bytes": 256, "combine_bytes": 256, "expert_bytes": 1000, "other_bytes": 5000}


def recordings(ranks):
    return [TrafficRecorder(EngineFacts(**FACTS, rank=rank, ranks=ranks)) for rank in range(ranks)]


def load(experts):
    return np.bincount(np.array(experts, dtype=np.int64), minlength=4)


@given(
    passes=st.lists(
        st.tuples(st.integers(0, 2000), st.integers(0, 1), st.integers(0, 1), st.lists(st.integers(0, 3), max_size=6))
    ),
)
def test_every_choice_is_counted_once_and_windows_are_the_same_on_all_ranks(passes):
    ranks = recordings(2)
    expected_LSE = np.zeros((2, 2, 4), dtype=np.int64)
    for step, rank, layer, experts in sorted(passes):
        ranks[rank].count(step, [layer], load(experts)[None])
        np.add.at(expected_LSE, (layer, rank, experts), 1)
    records = [each.record() for each in ranks]
    if not expected_LSE.any():
        with pytest.raises(BadInput, match="no traffic was recorded"):
            merged(records)
        return
    profile = merged(records)
    assert (profile.tokens_TLSE.sum(axis=0) == expected_LSE).all()
    assert profile.windows <= MAX_WINDOWS
    width = max(record.width for record in records)
    by_window = [
        [e for step, _, _, experts in passes if step // width == w for e in experts]
        for w in sorted({p[0] // width for p in passes})
    ]
    assert [len(each) for each in by_window if each] == profile.tokens_TLSE.sum(axis=(1, 2, 3)).tolist()


def choices(load_LE):
    return ChoiceCounts(torch.tensor(load_LE))


def test_what_passes_saw_is_counted_and_timed():
    """Two passes; in the second this rank counts some of its rows, and the experts that all its rows chose are active."""
    together, apart = recordings(1)[0], recordings(1)[0]
    first_LE, own_LE, local_LE = [[1, 2, 1, 0], [1, 0, 1, 2]], [[1, 0, 1, 0], [0, 1, 1, 0]], [[2, 1, 1, 0], [0, 1, 2, 1]]
    together.add_timing(0, "expert", Span(1.0, 1.5), 4, 0)
    together.add_timing(1, "gate", 0.25, 2)
    together.add_timing(1, "expert", 1.0, 4, 0)
    together.end_pass(4, choices(first_LE), choices(first_LE))
    together.add_timing(0, "gate", None, 2)  # in a captured graph
    together.add_timing(0, "expert", 2.0, 4, 4)
    together.add_timing(1, "expert", 3.0, 4, 0)
    together.end_pass(5, choices(own_LE), choices(local_LE))
    assert not together._passes_L.any()  # noted only
    for step, own in ((4, first_LE), (5, own_LE)):
        apart.count(step, [0, 1], np.array(own))
    for timing in ((0, 0.5, 3), (1, 1.0, 3), (0, 2.0, 4), (1, 3.0, 3)):
        apart.add_timing(timing[0], "expert", timing[1], 4, timing[2])
    apart.add_timing(1, "gate", 0.25, 2)
    apart.end_pass(5, choices(np.zeros((2, 4), dtype=np.int64)), choices(first_LE))
    for name, value in vars(apart.record()).items():
        np.testing.assert_array_equal(getattr(together.record(), name), value, name)


def test_what_is_noted_is_added_up_before_it_grows():
    rank = recordings(1)[0]
    for step in range(4 * PENDING_LIMIT):
        rank.add_timing(0, "expert", 0.5, 2)
        rank.end_pass(step, choices([[1, 1, 0, 0], [0] * 4]), choices([[1, 1, 0, 0], [0] * 4]))
        assert len(rank._passes) < PENDING_LIMIT
    assert rank._passes_L[0] >= 3 * PENDING_LIMIT
    record = rank.record()
    assert record.tokens_TLE.sum(axis=0).tolist() == [[4 * PENDING_LIMIT, 4 * PENDING_LIMIT, 0, 0], [0] * 4]
    assert record.passes_L.tolist() == [4 * PENDING_LIMIT, 0]


def test_a_record_without_timings_says_so():
    one = recordings(1)[0]
    one.end_pass(0, choices([[1, 1, 0, 0], [0] * 4]), choices([[1, 1, 0, 0], [0] * 4]))
    assert "replayed from CUDA graphs" in merged([one.record()]).provenance["timings"]
    one.add_timing(0, "expert", 0.5, 2)
    one.end_pass(1, choices([[1, 1, 0, 0], [0] * 4]), choices([[1, 1, 0, 0], [0] * 4]))
    assert "timings" not in merged([one.record()]).provenance


def test_timings_become_curves():
    rank = recordings(1)[0]
    rank.count(0, [0], load([0, 1])[None])
    for active, tokens in ((1, 8), (2, 8), (3, 64), (4, 200)):
        rank.add_timing(0, "expert", 0.2 + 0.5 * active + 0.01 * tokens, tokens, active)
    rank.add_timing(1, "gate", 0.3, 10)
    rank.add_timing(1, "gate", 0.6, 20)
    rank.end_pass(0, choices([[0] * 4] * 2), choices([[1] * 4] * 2))
    curves = merged([rank.record()]).curves["cpu"]
    assert curves["expert"](100) == pytest.approx(0.5 + 1.0)
    assert curves["overhead"](200) == pytest.approx(0.2)
    assert curves["gate"](30) == pytest.approx(0.9)
    assert curves["aggregate"](30) == 0


COEFFICIENT = st.floats(0, 5)


@given(
    st.tuples(COEFFICIENT, COEFFICIENT, COEFFICIENT),
    st.lists(st.tuples(st.just(1), st.integers(1, 9), st.integers(1, 99)), min_size=2, max_size=9),
)
def test_coefficients_are_found_again(abc, points):
    rows_X3 = np.array(points, dtype=np.float64)
    found_3 = not_negative(rows_X3.T @ rows_X3, rows_X3.T @ (rows_X3 @ abc))
    assert (found_3 >= 0).all()
    assert rows_X3 @ found_3 == pytest.approx(rows_X3 @ abc, rel=1e-4, abs=1e-4)


def test_files_of_all_ranks_make_a_profile_that_can_be_saved(tmp_path):
    for rank in recordings(3):
        rank.count(5, [0, 1], np.stack([load([0, rank.facts.rank + 1])] * 2))
        save_record(rank.record(), tmp_path / "seen")
    profile = load_records(tmp_path / "seen")
    save(profile, tmp_path / "p.npz")
    assert load_profile(tmp_path / "p.npz").digest == profile.digest
    assert profile.tokens_TLSE[0, 1].tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]


def test_what_does_not_belong_together_is_refused(tmp_path):
    one, _ = recordings(2)
    one.count(0, [0], load([0, 1])[None])
    with pytest.raises(BadInput, match=r"expected a record of each of 2 ranks, found \[0\]"):
        merged([one.record()])
    other = TrafficRecorder(EngineFacts(**FACTS | {"model": "another"}, rank=1, ranks=2))
    with pytest.raises(BadInput, match="found model 'another' on rank 1, 'tiny' on rank 0"):
        merged([one.record(), other.record()])
    with pytest.raises(BadInput, match=r"expected files rank-0.npz, ..., found none"):
        load_records(tmp_path)
