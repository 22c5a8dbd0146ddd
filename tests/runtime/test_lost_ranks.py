"""When a rank hangs, dies, or sends what was not agreed, the others end in time and say who, where and in which model."""

import os
import re
import signal
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from aurora.errors import AuroraError, RankFailed
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.serving_rank import serve_rank
from aurora.runtime.transports.gloo import GlooTransport
from aurora.types import Hierarchy, RunOptions
from tests.runtime.test_run import hierarchical, plan_for, prompts_for

pytestmark = pytest.mark.full

TIMEOUT_S = 5.0  # that ranks wait for each other: longer than any of them waits for a core of a busy machine
GUILTY = 1
CALL = 4  # the guilty rank's exchange that goes wrong: the combine of layer 1


def hang(order, sends):
    time.sleep(2 * TIMEOUT_S)
    return order, sends


def die(order, sends):
    os.kill(os.getpid(), signal.SIGKILL)


def send_less(order, sends):
    """One row fewer than the counts say."""
    return order, [tensor[1:] for tensor in sends]


def leave_out(order, sends):
    """An order for half of every pair's rows."""
    return replace(order, share_X2=np.tile([0.0, 0.5], (len(order.pairs_X2), 1))), sends


def serve_with(rank_info, fault, call, folder, *args):
    """Serve, with `fault` in the guilty rank's exchange `call`; writes what this rank says, and how long after it it did."""
    exchange, calls = GlooTransport.exchange, []

    def counted(transport, order, sends, recvs, observe):
        calls.append(time.monotonic())
        if rank_info.rank == GUILTY and len(calls) == call:
            order, sends = fault(order, sends)
        return exchange(transport, order, sends, recvs, observe)

    GlooTransport.exchange = counted
    try:
        serve_rank(rank_info, *args)
        said = "no error"
    except AuroraError as error:
        said = f"{type(error).__name__}: {error}"
    (folder / str(rank_info.rank)).write_text(f"{time.monotonic() - calls[call - 1]:.3f} {said}")
    time.sleep(0.2)  # a rank that leaves closes its connections: the others shall fail by themselves


STAGE = 8  # the second stage of layer 1's combine, of two groups of experts that overlap
STEP = 11  # the second of the three steps of layer 1's combine, on two servers of one rank


@pytest.mark.parametrize(
    ("fault", "call", "expected"),
    [
        (hang, STEP, {0: r"RankFailed: mixtral-topics, layer 1, combine: rank 0 lost rank 1: .*"}),
        (die, STEP, {0: r"RankFailed: mixtral-topics, layer 1, combine: rank 0 lost rank 1: .*"}),
        (hang, STAGE, {0: r"RankFailed: mixtral-topics, layer 1, combine: rank 0 lost rank 1: .*"}),
        (die, STAGE, {0: r"RankFailed: mixtral-topics, layer 1, combine: rank 0 lost rank 1: .*"}),
        (hang, CALL, {0: r"RankFailed: mixtral-topics, layer 1, combine: rank 0 lost rank 1: .*[Tt]ime(d |)out.*"}),
        (die, CALL, {0: r"RankFailed: mixtral-topics, layer 1, combine: rank 0 lost rank 1: .*by peer.*"}),
        (send_less, CALL, dict.fromkeys((0, 1), r"RankFailed: mixtral-topics, layer \d, \w+: rank \d lost rank \d: .*")),
        (leave_out, CALL, {0: r"RankFailed: mixtral-topics, layer 1, combine: rank 0 lost rank 1: .*",
                     1: r"BadInput: mixtral-topics, layer 1, combine: order openshop: carries \d+ of the \d+ rows of 0 -> 1"}),
    ],
)  # fmt: skip
def test_whoever_is_left_says_who_where_and_in_which_model(mixtral, tmp_path, fault, call, expected):
    plan = plan_for([mixtral], 2)
    plan = hierarchical(plan, Hierarchy(np.arange(2), 2)) if call == STEP else plan
    args = (plan, [mixtral], [prompts_for(mixtral, 6)], RunOptions(timeout_s=TIMEOUT_S, overlap=2 if call == STAGE else 1))
    dies = pytest.raises(RankFailed, match="rank 1 of 2 died") if fault is die else nullcontext()
    with dies:
        launch(serve_with, 2, fault, call, tmp_path, *args, timeout_s=20 * TIMEOUT_S)
    for rank, pattern in expected.items():
        seconds, said = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert re.fullmatch(pattern, said), said
        assert float(seconds) < 10 * TIMEOUT_S


def test_with_two_models_both_lanes_of_whoever_is_left_end(mixtral, qwen, tmp_path):
    """Rank 1 hangs in an exchange of one of them: the other model, waiting for its turn, does not wait for ever."""
    paths = [mixtral, qwen]
    prompts = [prompts_for(mixtral, 6), prompts_for(qwen, 4)]
    args = (plan_for(paths, 2), paths, prompts, RunOptions(timeout_s=TIMEOUT_S))
    launch(serve_with, 2, hang, CALL, tmp_path, *args, timeout_s=20 * TIMEOUT_S)
    seconds, said = (tmp_path / "0").read_text().split(" ", 1)
    where = r"(mixtral-topics|qwen3moe-stdlib), (layer \d, \w+|between steps)"
    assert re.fullmatch(rf"RankFailed: {where}: rank 0 lost rank 1: .*[Tt]ime(d |)out.*", said), said
    assert float(seconds) < 10 * TIMEOUT_S
