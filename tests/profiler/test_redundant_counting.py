"""Profiles that many workers count are the profile that one counts."""

import os
import signal
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from aurora.errors import BadInput
from aurora.models.loading import load_model
from aurora.models.prompts import Corpus
from aurora.profiler.profile_model import profile_with_workers
from aurora.profiler.redundant_counting import count_with_workers, packed, unpacked
from aurora.profiler.routing_counts import RoutingCounts, next_round, route_round
from aurora.runtime.distributed.launcher import RankInfo, hosted_store, start_process
from aurora.types import CountingOptions, ProfileOptions

OPTIONS = ProfileOptions(sources=2, prompt_tokens=24, batch=1, max_new_tokens=2, limit=5)


@pytest.fixture(scope="module")
def model(mixtral):
    return load_model(mixtral)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Prompts of many lengths, some short, in two files."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "chats.jsonl").write_text("".join(f'{{"prompt": "{"ab " * (3 + 5 * i)}"}}\n' for i in range(3)))
    (folder / "text.txt").write_text("".join(f"def line_{i}(x): return x + {i}\n" for i in range(20)))
    return [folder / "chats.jsonl", folder / "text.txt"]


def by_one(model, files, options):
    """Round after round in this process."""
    prompts = islice(Corpus(model.tokenizer, model.vocabulary, files, options.prompt_tokens), options.limit)
    state, keep = RoutingCounts(), options.token_level or options.coactivation
    while any(batches := next_round(prompts, options)):
        passes = route_round(model, batches, options.max_new_tokens, keep)
        state = state.add(passes, batches, options, model.top_k)
    return state


def same(found, expected):
    assert (found.tokens_TLSE == expected.tokens_TLSE).all()
    assert (found.stages, found.prompts) == (expected.stages, expected.prompts)
    for name in ("experts_ULK", "source_U", "window_U", "sequence_U"):
        assert np.array_equal(getattr(found.routing, name, None), getattr(expected.routing, name, None))
    for name in ("together_LEE", "next_LEE"):
        assert np.array_equal(getattr(found.coactivation, name, None), getattr(expected.coactivation, name, None))


@pytest.mark.parametrize(
    ("scheme", "workers", "asked"),
    [
        ("balanced", 4, {"token_level": True, "coactivation": True}),
        ("cyclic", 3, {"token_level": True, "window": 30}),
        ("uncoded", 7, {"window": 30, "coactivation": True}),
    ],
)
def test_the_same_counts_windows_choices_and_pairs(scheme, workers, asked, mixtral, model, files):
    """Five batches of prompts: seven workers are two too many. Windows of 30 tokens hold batches of several workers."""
    options = replace(OPTIONS, **asked)
    expected = by_one(model, files, options)
    assert len(expected.windows) == (4 if options.window else 6)
    same(count_with_workers(model, mixtral, files, options, CountingOptions(workers, scheme=scheme)), expected)
    same(unpacked(packed(expected), expected), expected)


def stalls(worker, _number):
    return 600.0 if worker == 1 else 0.0


def dies(worker, _number):
    if worker == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


@pytest.mark.parametrize("delay_s", [stalls, dies])
def test_a_worker_that_stalls_or_dies_is_not_waited_for(delay_s, mixtral, model, files):
    seen = []
    found = count_with_workers(model, mixtral, files, OPTIONS, CountingOptions(4), watch=seen.append, delay_s=delay_s)
    same(found, by_one(model, files, OPTIONS))
    assert seen[-1][1].state in ("not waited for", "killed by signal 9")


def as_a_rank(connection, rank_info, path, files):
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    connection.send(count_with_workers(load_model(path), path, files, OPTIONS, CountingOptions(2), rank_info=rank_info))


def test_hosts_meet_as_torchrun_starts_them(mixtral, model, files):
    """Rank 0 counts and the other serves, in a process that ends with the collection."""
    with hosted_store(0) as (host, port):
        ranks = [
            start_process(RankInfo(r, 2, host, port, 60.0, 0, 1, launched=False), as_a_rank, mixtral, files) for r in range(2)
        ]
        same(ranks[0][1].recv(), by_one(model, files, OPTIONS))
        with pytest.raises(EOFError):
            ranks[1][1].recv()
        for child, connection in ranks:
            child.join(60)
            connection.close()
            assert child.exitcode == 0


def test_refusals(mixtral, model, files):
    with pytest.raises(BadInput, match="`redundancy`: expected from 1 to the 2 workers, found 3"):
        count_with_workers(model, mixtral, files, OPTIONS, CountingOptions(2, 3))
    with pytest.raises(BadInput, match="`workers`: expected more than zero, found 0"):
        CountingOptions(0)
    rank_info = RankInfo(0, 3, "127.0.0.1", 1, 1.0, 0, 3, launched=False)
    with pytest.raises(BadInput, match="`workers`: expected the 3 ranks of this run, found 2"):
        count_with_workers(model, mixtral, files, OPTIONS, CountingOptions(2), rank_info=rank_info)
    with pytest.raises(BadInput, match="`precision`: expected no `workers`"):
        profile_with_workers(mixtral, files, replace(OPTIONS, precision=0.1), CountingOptions(2))
