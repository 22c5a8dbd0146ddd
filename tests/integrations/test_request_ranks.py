from types import SimpleNamespace

import pytest
from aurora_vllm.request_ranks import chosen_rank
from aurora_vllm.settings import Settings
from aurora_vllm.vllm_internals import requests
from aurora_vllm.vllm_internals.requests import check_requests, rank_of_next

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


def client(engines=2):
    names = [bytes([number, 0]) for number in range(engines)]
    return SimpleNamespace(core_engines=names, reqs_in_flight={}, lb_engines=IDLE, client_count=1, client_index=0)


def test_the_loads_are_those_of_prompts_that_vllm_has_not_computed():
    of = client()
    states = {
        "computed": SimpleNamespace(is_prefilling=False, prompt_len=9000),
        "not sent": SimpleNamespace(is_prefilling=True, prompt_len=9000),
        "computing": SimpleNamespace(is_prefilling=True, prompt_len=10),
    }
    of.reqs_in_flight = {"computed": b"\x01\0", "computing": b"\0\0", "aborted": b"\x01\0"}
    assert rank_of_next(of, states) == 1
    of.reqs_in_flight["computing"] = b"\x01\0"  # as the user may have sent it
    assert rank_of_next(of, states) == 0


def test_api_servers_begin_with_different_ranks_and_those_of_one_rank_choose_none():
    assert rank_of_next(client(1), {}) is None
    of = client(4)
    of.lb_engines, of.client_count, of.client_index = IDLE * 2, 2, 1
    assert [rank_of_next(of, {}) for _ in range(4)] == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("rule", "ranks", "backend", "moe", "interval", "message"),
    [
        ("tokens", 1, "mp", True, 1, "requests: expected two data-parallel ranks or more for 'tokens', found 1"),
        ("tokens", 2, "external_launcher", True, 1, "requests: expected `vllm serve` for 'tokens', found torchrun"),
        ("cadence", 2, "mp", False, 1, "requests: expected a mixture of experts for 'cadence'"),
        (
            "cadence",
            2,
            "mp",
            True,
            4,
            "requests: expected no --prefill-schedule-interval with 'cadence', which plans it, found 4",
        ),
        ("tokens", 2, "mp", True, 4, None),
        ("stock", 1, "mp", False, 4, None),
    ],
)
def test_what_a_server_cannot_do_is_one_sentence_before_anything_is_loaded(
    monkeypatch, rule, ranks, backend, moe, interval, message
):
    monkeypatch.setattr(requests, "check_api", lambda name: None)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=ranks, distributed_executor_backend=backend),
        scheduler_config=SimpleNamespace(prefill_schedule_interval=interval),
        model_config=SimpleNamespace(is_moe=moe),
    )
    if message is None:
        check_requests(Settings(requests=rule), config)
    else:
        with pytest.raises(BadInput, match=message):
            check_requests(Settings(requests=rule), config)
