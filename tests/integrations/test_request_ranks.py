from collections import Counter
from types import SimpleNamespace

import pytest
from aurora_vllm.request_ranks import RankPrompts, chosen_rank
from aurora_vllm.settings import Settings
from aurora_vllm.vllm_internals import conditions
from aurora_vllm.vllm_internals.conditions import check_conditions
from aurora_vllm.vllm_internals.requests import give_rank, step_ended

from aurora.errors import BadInput

IDLE = [(0, 0, 0.0), (0, 0, 0.0)]


def test_prompts_of_unequal_length_make_ranks_equal():
    """8000, 500, 8000 and 500 tokens at once on two ranks: 8,500 on each."""
    sent, tokens_R = [], [0, 0]
    for number, tokens in enumerate((8000, 500, 8000, 500)):
        sent.append((chosen_rank(sent, IDLE, 1, number), tokens))
        tokens_R[sent[-1][0]] += tokens
    assert [rank for rank, _ in sent] == [0, 1, 1, 0]
    assert tokens_R == [8500, 8500]


def test_of_ranks_without_prompts_the_one_with_the_emptier_cache_is_taken():
    assert chosen_rank([], [(0, 9, 0.5), (0, 9, 0.25)], 1, 0) == 1
    assert [chosen_rank([], IDLE, 1, sent) for sent in range(4)] == [0, 1, 0, 1]


def test_prompts_of_other_api_servers_count_as_long_as_the_own():
    """Rank 0 has one prompt of 100 tokens; on rank 1, which has one of 60, two others of another server wait."""
    prompts, published = [(0, 100), (1, 60)], [(1, 0, 0.0), (3, 0, 0.0)]
    assert chosen_rank(prompts, published, 1, 0) == 1, "the only API server knows all prompts"
    assert chosen_rank(prompts, published, 2, 0) == 0


def test_prompts_in_the_running_step_count_no_more():
    """A step of 1000 tokens and 4 requests takes 300 of "a" and 700 of "b"'s 900; "c" came later. 200 + 200 are left."""
    prompts = RankPrompts(1000, 4)
    for name, tokens in (("a", 300), ("b", 900), ("c", 200)):
        prompts.sent(name, tokens)
        if name == "b":
            prompts.stepped({"a", "b"}, 2)
    assert prompts.left({"a", "b", "c"}) == [0, 200, 200]
    prompts.stepped({"b", "c"}, 3)  # "a" generates: 999 tokens are free
    assert prompts.left({"b", "c"}) == [0, 0]
    prompts.sent("d", 50)
    prompts.stepped({"d"}, 5)  # four requests generate: no other may begin
    assert prompts.left({"d"}) == [50]


def client(engines=2):
    names = [number.to_bytes(2, "little") for number in range(engines)]
    limits = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=1000, max_num_seqs=8))
    return SimpleNamespace(
        core_engines=names, lb_engines=[(0, 0, 0.0)] * engines, client_count=1, client_index=0, vllm_config=limits,
        engine_inflight=Counter(),
    )  # fmt: skip


def rank_of(of, name, tokens, computing, rank=None):
    """The rank that a request gets."""
    request = SimpleNamespace(
        request_id=name, prompt_token_ids=[1] * tokens, prompt_embeds=None, data_parallel_rank=rank, sampling_params=0
    )
    give_rank(of, request, computing)
    of.engine_inflight[of.core_engines[request.data_parallel_rank]] += 1
    return request.data_parallel_rank


def test_the_loads_are_those_of_prompts_that_vllm_has_not_computed():
    of, computing = client(), {"user's", "long", "short", "next"}
    assert rank_of(of, "user's", 10, computing, rank=1) == 1, "a rank that the user gave wins, and counts"
    assert rank_of(of, "long", 900, computing) == 0
    assert rank_of(of, "short", 20, computing) == 1
    step_ended(of, of.core_engines[0])  # the next step computes the long prompt
    assert rank_of(of, "next", 5, computing) == 0
    computing.remove("short")
    computing.remove("user's")
    assert rank_of(of, "last", 5, computing) == 1, "what is computed counts no more"


def test_api_servers_begin_with_different_ranks():
    of = client(4)
    of.client_count, of.client_index = 2, 1
    assert [rank_of(of, str(number), 9, set()) for number in range(4)] == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("rule", "ranks", "backend", "moe", "interval", "message"),
    [
        ("tokens", 1, "mp", True, 1, "requests: expected several data-parallel ranks, found 1"),
        ("tokens", 2, "external_launcher", True, 1, "requests: expected `vllm serve`, found torchrun"),
        ("cadence", 2, "mp", False, 1, "requests: expected a mixture of experts for 'cadence'"),
        ("cadence", 2, "mp", True, 4, "requests: expected no --prefill-schedule-interval with 'cadence'.* found 4"),
        ("tokens", 2, "mp", True, 4, None),
        ("stock", 1, "mp", False, 4, None),
    ],
)
def test_what_a_server_cannot_do_is_one_sentence_before_anything_is_loaded(
    monkeypatch, rule, ranks, backend, moe, interval, message
):
    monkeypatch.setattr(conditions, "lacks", lambda name: iter(()))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=ranks, distributed_executor_backend=backend),
        scheduler_config=SimpleNamespace(prefill_schedule_interval=interval),
        model_config=SimpleNamespace(is_moe=moe),
    )
    if message is None:
        check_conditions(Settings(requests=rule), config)
    else:
        with pytest.raises(BadInput, match=message):
            check_conditions(Settings(requests=rule), config)


@pytest.mark.parametrize(
    ("settings", "recovers", "backend", "message"),
    [
        (Settings(fault_store="here"), True, "mp", "expected no auto_recovery in --fault-tolerance-config"),
        (Settings(fault_store="here"), False, "ray", "expected --data-parallel-backend mp, found ray"),
        (Settings(requests="cadence"), False, "ray", "expected --data-parallel-backend mp, found ray"),
        (Settings(fault_store="here"), False, "mp", None),
        (Settings(requests="tokens"), True, "ray", None),
    ],
)
def test_one_alone_decides_about_lost_ranks_and_only_where_engines_are_the_plugins(
    monkeypatch, settings, recovers, backend, message
):
    monkeypatch.setattr(conditions, "lacks", lambda name: iter(()))
    parallel = SimpleNamespace(
        data_parallel_size=2, data_parallel_backend=backend, enable_fault_tolerance=True, enable_eplb=True,
        fault_tolerance_config=SimpleNamespace(auto_recovery=recovers), all2all_backend=conditions.BACK_END,
        pipeline_parallel_size=1,
    )  # fmt: skip
    config = SimpleNamespace(
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(prefill_schedule_interval=1),
        model_config=SimpleNamespace(is_moe=True),
    )
    if message is None:
        check_conditions(settings, config)
    else:
        with pytest.raises(BadInput, match=message):
            check_conditions(settings, config)
