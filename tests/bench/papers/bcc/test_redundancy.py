"""Replays by hand, and choices that pay."""

import numpy as np

from aurora.algorithms.gradient_codes import make_code
from bench.papers.bcc.redundancy import choose_load, code_by_speed, replay


def rng():
    return np.random.default_rng(0)


def test_a_replay_by_hand():
    """Four workers, two groups: 0 and 2 hold one, 1 and 3 the other, or however the code was drawn."""
    code = make_code("balanced", 4, 4, 2, rng())
    twin = int(np.flatnonzero((code.holds_WB == code.holds_WB[0]).all(axis=1))[1])
    others = [w for w in range(4) if w not in (0, twin)]
    seconds_W = np.zeros(4)
    seconds_W[[0, twin, *others]] = [1.0, 1.5, 2.0, 9.0]
    ended, waited = replay(code, seconds_W[None])
    assert (ended[0], waited[0]) == (2.0, 3)
    ended, waited = replay(code, seconds_W[None], receive_s=1.0)
    assert ended[0] == 4.0  # 1 + 1, then 1, then 1: the master is busy from the first on
    seconds_W[others] = np.inf
    ended, waited = replay(code, seconds_W[None])
    assert (ended[0], waited[0]) == (np.inf, 2)


def test_a_code_is_waited_for_as_it_says():
    code = make_code("cyclic", 5, 5, 2, rng())
    ended, waited = replay(code, np.array([[3.0, 1.0, 5.0, 2.0, 4.0]]))
    assert (ended[0], waited[0]) == (4.0, 4)


def test_steady_workers_need_no_copies_and_a_stalled_one_does():
    assert choose_load(np.ones((8, 10)), [1, 2, 5, 10], 10)[0] == 1
    stalled_IW = np.ones((8, 10))
    stalled_IW[:, 3] = 10.0
    assert choose_load(stalled_IW, [1, 2, 5, 10], 10)[0] == 2


def test_what_does_not_grow_with_the_load():
    """Delays of the network: every copy is free until its work takes as long."""
    delays_IW = 1.0 + rng().exponential(20.0, (40, 10))
    assert choose_load(delays_IW, [1, 2, 5, 10], 10, work_s=0.0)[0] == 10
    assert choose_load(delays_IW, [1, 2, 5, 10], 10, work_s=100.0)[0] == 1


def test_who_is_slow_only_repeats_what_quick_ones_hold():
    """Half of the workers are slow in every iteration: dealt by speed, nobody waits for them."""
    slow_IW = np.where(np.arange(12) % 2, 9.0, 1.0) * np.ones((6, 12))
    load, code = choose_load(slow_IW, [1, 2], 12, work_s=0.5)
    assert load == 2
    assert replay(code, slow_IW)[0].tolist() == [1.0] * 6
    holds_WB = code_by_speed(np.array([3.0, 1.0, 2.0, 4.0, 5.0]), 4, 2).holds_WB
    assert holds_WB.tolist() == [[False, False, True, True], [True, True, False, False], [False, False, True, True],
                                 [True, True, False, False], [True, True, False, False]]  # fmt: skip
