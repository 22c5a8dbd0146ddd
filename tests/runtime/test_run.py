"""Distributed runs against the plain model in one process: the same tokens, the same logits."""

import os
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import aurora
from aurora.errors import BadInput, BrokenPlan
from aurora.models.decoding import greedy_decode
from aurora.models.loading import load_model
from aurora.planner.options import with_priorities
from aurora.planner.plan import make_plan
from aurora.profiler.profile_model import profile_model
from aurora.runtime import serving_rank
from aurora.runtime.distributed.launcher import launch
from aurora.runtime.layer_context import LayerContext
from aurora.runtime.phase_recorder import HostTimer
from aurora.runtime.process_port_arbiter import colocation_folder
from aurora.runtime.result import merge_results
from aurora.runtime.run import verify
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.nccl import NcclCalls, NcclTransport
from aurora.runtime.transports.process_groups import new_process_group
from aurora.simulator.interpreter import simulate_plan
from aurora.types import (
    TRACE_PHASES,
    Curve,
    Cut,
    Hierarchy,
    Placement,
    PlanOptions,
    Profile,
    ProfileOptions,
    RunOptions,
    Servers,
)
from tests.conftest import cluster
from tests.models.architectures import SERVED, build

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "import",
    "os",
    "prints",
    "every",
    "class",
    "it",
    "has",
    "seen",
]
full = pytest.mark.full
FLAT = {phase: Curve(np.array([1.0]), np.array([1e-3])) for phase in ("gate", "expert", "aggregate")}


def plan_for(paths, ranks, options=PlanOptions("random", "random", "random", "openshop", seed=2), **gpu):
    profiles = []
    for path in paths:
        model = load_model(path)
        tokens = np.random.default_rng(0).integers(0, 50, (1, len(model.layers), ranks, model.experts)) * model.top_k
        profiles.append(Profile(model.name, model.fingerprint(), tokens, model.top_k, 1, 1, model.expert_bytes,
                                model.other_bytes, {"cpu": FLAT}))  # fmt: skip
    return make_plan(cluster(*[50e6] * ranks, **gpu), profiles, options)


def hierarchical(plan, hierarchy):
    """The plan with all-to-alls over servers."""
    return replace(plan, models=tuple(replace(model, hierarchy=hierarchy) for model in plan.models))


def with_replicas(plan):
    """The plan with every expert of its first model on two of four ranks, one of them on all."""
    held = tuple(tuple(sorted({*(range(8)[rank * 2 :][:4]), *(range(8)[: max(0, rank * 2 - 4)]), 3})) for rank in range(4))
    first, *others = plan.models
    replicated = replace(first, placement=Placement.evenly((held,) * len(first.dispatch_L)))
    return replace(plan, models=(replicated, *others))


def prompts_for(path, count, seed=0):
    """Prompts of quite different lengths."""
    tokenizer, rng = load_model(path).tokenizer, np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(count)]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def moved(trace, columns):
    """The bytes that are sent, by the values in these columns."""
    found, sent_X = Counter(), trace.sent_X & (trace.peer_X >= 0)
    names = (*columns.split(), "bytes")
    for *key, size in zip(*(getattr(trace, f"{name}_X")[sent_X].tolist() for name in names), strict=True):
        found[tuple(key)] += size
    return found


def answered(plan, paths, prompts, **options):
    """Returns the result of a run, all of whose answers are the plain models'."""
    chosen = RunOptions(max_new_tokens=4, batch=3, timeout_s=120, keep_logits=True)
    chosen = replace(chosen, **options)
    result = aurora.run(plan, paths, prompts, chosen)
    for answers, requests in zip(result.answers_M, prompts, strict=True):
        assert sorted(answers.tokens) == sorted(answers.logits) == list(range(len(requests)))
    assert verify(result, paths, prompts, chosen) == []
    return result


@pytest.mark.parametrize("name", [name if name == "deepseek_v3" else pytest.param(name, marks=full) for name in SERVED])
def test_every_architecture_gives_the_plain_models_output(name, tmp_path):
    folder = build(name, tmp_path / name)
    answered(plan_for([folder], 2), [folder], [prompts_for(folder, 5)])


@pytest.mark.parametrize(
    ("order", "transport"),
    [
        ("openshop", "shaped"),
        ("paced", "memory"),
        *(pytest.param(order, "gloo", marks=full) for order in ("openshop", "random", "paced")),
        *(pytest.param(order, "shaped", marks=full) for order in ("all-at-once", "paced")),
    ],
)
def test_two_shipped_models_on_four_ranks(mixtral, qwen, order, transport):
    paths = [mixtral, qwen]
    plan = plan_for(paths, 4, PlanOptions("random", "random", "random", order, seed=3))
    prompts = [prompts_for(mixtral, 9), prompts_for(qwen, 6, seed=1)]
    result = answered(plan, paths, prompts, transport=transport)
    assert (result.transport, result.calibration) == (transport, None)
    trace = result.trace
    assert (trace.kind, trace.names_M, trace.ranks) == ("measured", ("mixtral-topics", "qwen3moe-stdlib"), 4)
    for phase in TRACE_PHASES[:-1]:  # no expert moves
        assert (trace.phase_X == TRACE_PHASES.index(phase)).any()
    # What is sent is received, and what is dispatched comes back.
    for model in range(2):
        rows = trace.model_X == model
        sent, received = (trace.bytes_X[rows & (trace.sent_X == s) & (trace.peer_X >= 0)].sum() for s in (True, False))
        assert sent == received > 0
        there, back = (trace.bytes_X[rows & (trace.phase_X == TRACE_PHASES.index(p))].sum() for p in ("dispatch", "combine"))
        assert there == back


@pytest.mark.parametrize("deduplicate", [pytest.param(False, marks=full), True])
def test_replicas_give_the_plain_models_output(mixtral, deduplicate):
    plan = with_replicas(plan_for([mixtral], 4))
    answered(plan, [mixtral], [prompts_for(mixtral, 9)], deduplicate=deduplicate)


@pytest.mark.full
@pytest.mark.parametrize(
    ("hierarchy", "transport", "order", "replicated"),
    [
        (Hierarchy(np.array([1, 0, 1, 0]), 3, 1), "gloo", "openshop", True),
        (Hierarchy(np.array([0, 0, 0, 1]), 1), "shaped", "birkhoff", False),
        (Hierarchy(np.array([0, 1, 2, 2]), 2), "memory", "all-at-once", False),
    ],
)
def test_all_to_alls_over_servers_give_the_plain_models_output(mixtral, qwen, hierarchy, transport, order, replicated):
    """Two models, ranks without tokens, and orders of one partner at a time, of split rows and without any sequence."""
    paths = [mixtral, qwen]
    plan = hierarchical(plan_for(paths, 4, PlanOptions("random", "random", "random", order, seed=3)), hierarchy)
    plan = with_replicas(plan) if replicated else plan
    answered(plan, paths, [prompts_for(mixtral, 9), prompts_for(qwen, 2, seed=1)], transport=transport)
    with pytest.raises(BadInput, match=r"`deduplicate`: expected .* hierarchical"):
        aurora.run(plan, paths, [[[1]], [[1]]], RunOptions(deduplicate=False))


@pytest.mark.full
def test_runs_over_servers_may_choose_their_orders_by_measurement(mixtral):
    """The plan's order and all others give the same answers."""
    plan = hierarchical(plan_for([mixtral], 4), Hierarchy(np.array([0, 0, 1, 1]), 2))
    result = answered(plan, [mixtral], [prompts_for(mixtral, 9)], transport="memory", order="auto")
    (used,) = result.orders_M
    assert set(used.exchanges) <= {f"{method} over servers" for method in result.calibration.methods}


def test_ranks_without_requests_keep_step(mixtral):
    """Two requests on four ranks, one at a time: ranks 2 and 3 never have any, rank 1 is idle at the end."""
    prompts = prompts_for(mixtral, 5)
    result = answered(plan_for([mixtral], 4), [mixtral], [prompts[:2]], batch=1)
    busy = result.trace.rank_X[result.trace.phase_X == TRACE_PHASES.index("expert")]
    assert set(busy.tolist()) == {0, 1, 2, 3}
    answered(plan_for([mixtral], 4), [mixtral], [prompts], batch=1)


def test_one_rank_alone(mixtral):
    result = answered(plan_for([mixtral], 1), [mixtral], [prompts_for(mixtral, 2)])
    assert not (result.trace.peer_X >= 0).any()


@pytest.mark.parametrize(
    ("transport", "interleave"),
    [("memory", "on"), *(pytest.param(*case, marks=full) for case in (("gloo", "on"), ("memory", "processes")))],
)
def test_time_slices_by_layer_give_the_same_answers(mixtral, qwen, monkeypatch, tmp_path, transport, interleave):
    """In chunks of a few rows, so that gates run between them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("aurora.runtime.distributed_experts.MIN_CHUNK_BYTES", 3 * 512)
    paths, prompts = [mixtral, qwen], [prompts_for(mixtral, 5), prompts_for(qwen, 3, seed=1)]
    plan = plan_for(paths, 2)
    plan = replace(plan, options=replace(plan.options, time_slice="layer", preemption_s=1e-6))
    colocate = "layers" if interleave == "processes" else None
    result = answered(plan, paths, prompts, transport=transport, interleave=interleave, colocate=colocate)
    trace = result.trace
    for rank in range(2):
        computes = (trace.rank_X == rank) & np.isin(trace.phase_X, [TRACE_PHASES.index(p) for p in ("gate", "expert")])
        order = np.argsort(trace.start_s_X[computes])
        starts, ends = trace.start_s_X[computes][order], trace.end_s_X[computes][order]
        assert (starts[1:] >= ends[:-1] - 1e-6).all()


@pytest.mark.full
@pytest.mark.parametrize("time_slice", ["layer", "step"])
def test_three_models_of_any_priority_give_the_same_answers(mixtral, qwen, time_slice):
    """One of them twice. By layer two are batch models, whose exchanges are cut into many slices of their own."""
    paths = [mixtral, qwen, mixtral]
    plan = plan_for(paths, 2)
    priorities = ("interactive", "batch", "batch") if time_slice == "layer" else ()
    options = replace(plan.options, time_slice=time_slice, priorities=priorities, preemption_s=1e-5)
    prompts = [prompts_for(path, count, seed=seed) for seed, (path, count) in enumerate(zip(paths, (5, 2, 1), strict=True))]
    result = answered(replace(plan, options=options), paths, prompts, transport="memory", batch=2)
    for answers, requests in zip(result.answers_M, prompts, strict=True):
        assert len(answers.ttft_s) == len(requests)
        assert len(answers.tpot_s) == sum(map(len, answers.tokens.values())) - len(requests)
        assert min(answers.ttft_s) > 0 < min(answers.tpot_s)


def test_a_batch_model_lets_others_go_first_in_all_of_its_parts(mixtral, qwen, monkeypatch):
    """Preemption points before projections and norms, each in the layer that it belongs to, and between chunks of experts."""
    points = []
    yields = LayerContext.yield_to_priority

    def seen(self, phase, layer):
        points.append((self.model, phase, layer))
        yields(self, phase, layer)

    monkeypatch.setattr(LayerContext, "yield_to_priority", seen)
    paths = [mixtral, qwen]
    plan = with_priorities(plan_for(paths, 2, PlanOptions(preemption_s=1e-6)), ["interactive", "batch"])
    answered(plan, paths, [prompts_for(mixtral, 2), prompts_for(qwen, 8, seed=1)], transport="memory", batch=8)
    layers = range(len(plan.models[1].dispatch_L))
    parts = {(1, phase, layer) for phase in ("gate", "expert") for layer in layers}
    assert set(points) == {*parts, (1, "head", layers[-1])}


@pytest.mark.full
def test_runs_of_their_own_processes_have_priorities(mixtral, qwen):
    """Two runs of one model each share two GPUs; what the batch model sends is cut, and the answers stay."""
    name = f"test{os.getpid()}"
    options = RunOptions(3, timeout_s=60, keep_logits=True, transport="gloo", interleave="processes", colocate=name)
    given = []
    for path, priority in ((mixtral, "interactive"), (qwen, "batch")):
        plan = with_priorities(plan_for([path], 2, PlanOptions(preemption_s=1e-5)), [priority], shared=True)
        given.append((plan, [path], [prompts_for(path, 6)]))
    try:
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda each: aurora.run(*each, options), given))
    finally:
        shutil.rmtree(colocation_folder(name))
    for result, (_, paths, prompts) in zip(results, given, strict=True):
        assert verify(result, paths, prompts, options) == []
    transfers = []  # the most in one dispatch of a rank
    for trace in (result.trace for result in results):
        own = (trace.phase_X == TRACE_PHASES.index("dispatch")) & (trace.peer_X >= 0)
        transfers.append(max(Counter(zip(trace.rank_X[own], trace.step_X[own], trace.layer_X[own], strict=True)).values()))
    assert transfers[0] == 2  # to the other rank and from it
    assert transfers[1] > 16, "what is cut"


@pytest.mark.full
@pytest.mark.parametrize("priorities", [(), ("interactive", "batch", "interactive")])
def test_models_leave_and_join_while_others_serve(mixtral, qwen, priorities):
    """Requests arrive in between; some at one rank only. A model makes no steps while it has none, and the answers stay."""
    paths = [mixtral, qwen, mixtral]
    plan = plan_for(paths, 2)
    plan = replace(plan, options=replace(plan.options, priorities=priorities, preemption_s=1e-4))
    prompts = [prompts_for(path, count, seed=seed) for seed, (path, count) in enumerate(zip(paths, (6, 3, 2), strict=True))]
    arrivals = [[0.0, 0.3, 0.05, 0.1, 0.6, 0.6], [0.2, 0.2, 0.7], [0.0, 0.4]]
    chosen = RunOptions(max_new_tokens=4, batch=2, timeout_s=120, keep_logits=True, transport="memory")
    result = aurora.run(plan, paths, prompts, chosen, arrivals=arrivals)
    assert verify(result, paths, prompts, chosen) == []
    trace = result.trace
    for model, at_s in enumerate(arrivals):
        assert trace.start_s_X[trace.model_X == model].min() >= min(at_s)
        steps = int(trace.step_X[trace.model_X == model].max()) + 1
        assert steps <= 4 * len(at_s)


def test_arrivals_that_do_not_fit_are_refused(mixtral):
    plan, prompts = plan_for([mixtral], 2), [prompts_for(mixtral, 2)]
    options = RunOptions(max_new_tokens=1, transport="memory")
    with pytest.raises(BadInput, match=r"`arrivals`: expected a time for each prompt, found \[1\]"):
        aurora.run(plan, [mixtral], prompts, options, arrivals=[[0.0]])
    with pytest.raises(BadInput, match="`arrivals`: expected from 0 to 1e\\+06 seconds, found -1"):
        aurora.run(plan, [mixtral], prompts, options, arrivals=[[0.0, -1.0]])


def test_one_after_the_other_gives_the_same_answers(mixtral, qwen):
    paths, prompts = [mixtral, qwen], [prompts_for(mixtral, 3), prompts_for(qwen, 5, seed=1)]
    result = answered(plan_for(paths, 2), paths, prompts, interleave="off", transport="memory")
    first, second = (result.trace.model_X == model for model in range(2))
    for rank in range(2):
        here = result.trace.rank_X == rank
        assert result.trace.end_s_X[first & here].max() <= result.trace.start_s_X[second & here].min()


@pytest.mark.full
@pytest.mark.parametrize("replicated", [False, True])
def test_a_simulation_of_a_run_over_servers_has_its_transfers(mixtral, text, replicated):
    """Bytes of every step, layer, phase and pair, with prompts of several lengths, so that some rows need no experts."""
    profile = profile_model(mixtral, [text], ProfileOptions(sources=4, prompt_tokens=16, limit=8))
    plan = hierarchical(make_plan(cluster(*[50e6] * 4), [profile], PlanOptions()), Hierarchy(np.array([0, 1, 1, 0]), 3))
    plan = with_replicas(plan) if replicated else plan
    options = RunOptions(max_new_tokens=3, batch=3, timeout_s=120, transport="memory", predictable=True)
    result = aurora.run(plan, [mixtral], [prompts_for(mixtral, 9)], options)
    columns = "step layer phase rank peer"
    expected = moved(result.trace, columns)
    assert len(expected) > 100
    assert moved(simulate_plan(plan, result.conditions.traffic([profile])), columns) == expected


def test_verify_sees_a_wrong_token_and_a_wrong_logit(mixtral):
    options = RunOptions(max_new_tokens=2, keep_logits=True, timeout_s=60)
    prompts = [prompts_for(mixtral, 2)]
    result = aurora.run(plan_for([mixtral], 2), [mixtral], prompts, options)
    assert verify(result, [mixtral], prompts, options) == []
    result.answers_M[0].logits[0][0, 0] += 3e-4
    result.answers_M[0].tokens[1][0] += 1
    found = verify(result, [mixtral], prompts, options)
    assert len(found) == 2
    assert re.search(r"prompt 0: logits (2\.9|3\.0)\de-04 apart", found[0])
    assert "prompt 1: tokens" in found[1]


def test_plans_of_other_models_are_refused_before_anything_starts(mixtral, qwen):
    prompts = [prompts_for(mixtral, 1)]
    with pytest.raises(
        BadInput, match=r"the plan of 'mixtral-topics' cannot serve model 'qwen3moe-stdlib'.*other router weights"
    ):
        aurora.run(plan_for([mixtral], 2), [qwen], prompts)
    with pytest.raises(BadInput, match="the plan has 1 models, found 2"):
        aurora.run(plan_for([mixtral], 2), [mixtral, qwen], prompts * 2)
    with pytest.raises(BadInput, match="at least one prompt"):
        aurora.run(plan_for([mixtral], 2), [mixtral], [[]])
    with pytest.raises(BadInput, match="`transport` nccl: expected a CUDA device for each of 2 ranks"):
        aurora.run(plan_for([mixtral], 2), [mixtral], prompts, RunOptions(transport="nccl"))


def test_nics_are_held_by_no_transport(mixtral):
    plan = plan_for([mixtral], 2)
    cuts = tuple(Cut(0.0, 0, ()) for _ in plan.models[0].dispatch_L)
    wired = replace(
        plan, cluster=replace(plan.cluster, servers=Servers((0, 1), 1.0)), models=(replace(plan.models[0], cut_L=cuts),)
    )
    with pytest.raises(BadInput, match="`transport` shaped: holds ports to their rates, but not the NICs"):
        aurora.run(wired, [mixtral], [prompts_for(mixtral, 1)], RunOptions(transport="shaped"))


def test_prompts_are_checked_before_serving(mixtral):
    plan = plan_for([mixtral], 2)
    for prompts, message in [
        (["text"], "as lists of token ids"),
        ([[5, -1]], "as lists of token ids"),
        ([[5, 259]], "mixtral-topics, prompt 0: token 259, its vocabulary has 259"),
        ([[5], [5] * 1020], "prompt 1: 1020 tokens and 16 new ones, it takes 1024"),
    ]:
        with pytest.raises(BadInput, match=message):
            aurora.run(plan, [mixtral], [prompts])


def test_a_plan_with_a_broken_order_is_refused_before_it_runs(mixtral):
    plan = plan_for([mixtral], 2)
    broken = replace(plan.models[0].dispatch_L[0], pairs_X2=np.array([[0, 1]]))
    model = replace(plan.models[0], dispatch_L=(broken, *plan.models[0].dispatch_L[1:]))
    with pytest.raises(BrokenPlan, match="each of 2 ordered pairs once"):
        aurora.run(replace(plan, models=(model,)), [mixtral], [prompts_for(mixtral, 1)])


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_the_reference_is_what_transformers_generates(name, tmp_path):
    """`verify` compares with decode_alone; this compares decode_alone with model.generate."""
    folder = build(name, tmp_path / name)
    plain = load_model(folder)
    for prompt in prompts_for(folder, 3):
        tokens, _ = greedy_decode(plain.model, prompt, 6, eos=1)
        expected = plain.model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=1)
        assert tokens == expected[0, len(prompt) :].tolist()


def test_missing_weights_are_not_made_up(tmp_path):
    folder = build("mixtral", tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "layers.0.self_attn.q_proj" not in k}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(BadInput, match=r"1 are missing, first model\.layers\.0\.self_attn\.q_proj\.weight"):
        load_model(folder)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["gloo", "memory"])
def test_the_order_may_be_chosen_by_measurement(mixtral, transport, monkeypatch):
    monkeypatch.setattr("aurora.runtime.order_calibration.SIZES", (1 << 10, 1 << 14))
    plan = plan_for([mixtral], 2, PlanOptions("random", "random", "random", "spread-out", seed=3))
    result = answered(plan, [mixtral], [prompts_for(mixtral, 4)], transport=transport, order="auto")
    collective = ("all_to_all_single",) if transport == "gloo" else ()
    assert result.calibration.methods == ("spread-out", "paced", *collective, "all-at-once")
    (used,) = result.orders_M
    layers = len(plan.models[0].dispatch_L)
    assert sum(used.exchanges.values()) == 2 * layers * (1 + result.trace.step_X.max())
    assert (result.calibration.seconds_CW > 0).all()
    assert "MB a rank: " in str(result.calibration)


def serve_in_stages(rank_info, *args):
    """One rank whose transports are NCCL's, with grouped calls over gloo."""

    def transports(policies_M, _cluster, _rank_info, device, options, heartbeats):
        made = []
        for _ in policies_M:
            group, control = (new_process_group("gloo", options.timeout_s) for _ in range(2))
            calls = NcclCalls(group, device, HostTimer(0.0))
            made.append(NcclTransport(calls, GlooTransport(control), options.timeout_s, heartbeats))
        return made, "stages"

    serving_rank._transports = transports
    return serving_rank.serve_rank(rank_info, *args)


@pytest.mark.parametrize("order", ["plan", pytest.param("auto", marks=full)])
def test_two_models_in_stages(mixtral, qwen, order):
    """What NCCL would do, over gloo: the plain models' answers, and a rank's transfers of an exchange one stage after another."""
    paths, ranks = [str(mixtral), str(qwen)], 3
    plan = plan_for(paths, ranks, PlanOptions("random", "random", "random", "matchings", seed=3))
    prompts = [prompts_for(mixtral, 3), prompts_for(qwen, 3)]
    options = RunOptions(max_new_tokens=3, timeout_s=120, order=order, transport="gloo", keep_logits=True)
    shares = launch(serve_in_stages, ranks, plan, paths, prompts, options, timeout_s=120)
    result = merge_results([share for of_rank in shares for share in of_rank], tuple(model.model for model in plan.models))
    assert verify(result, paths, prompts, options) == []
    assert (result.calibration is None) == (order == "plan")
    if order == "auto":
        return
    trace, planned = result.trace, plan.models[0].dispatch_L[0]
    own_X = (trace.phase_X == TRACE_PHASES.index("dispatch")) & (trace.model_X == 0) & (trace.layer_X == 0)
    stage_of = dict(zip(map(tuple, planned.pairs_X2.tolist()), planned.stage_X.tolist(), strict=True))
    spans = {}
    for row in np.flatnonzero(own_X & (trace.peer_X >= 0)):
        rank, peer = int(trace.rank_X[row]), int(trace.peer_X[row])
        stage = stage_of[(rank, peer) if trace.sent_X[row] else (peer, rank)]
        spans.setdefault((rank, trace.step_X[row]), []).append((stage, trace.start_s_X[row], trace.end_s_X[row]))
    for mine in spans.values():
        for (early, _, end_s), (late, start_s, _) in product(mine, mine):
            assert early >= late or end_s <= start_s + 1e-9
    assert max(len(mine) for mine in spans.values()) > 2


@pytest.mark.full
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_bfloat16_models_give_the_plain_models_output(name, tmp_path):
    """Dense first layers, shared experts, biases and weights on inputs, in the dtype of the files."""
    folder = build(name, tmp_path / name, torch.bfloat16)
    result = answered(plan_for([folder], 2), [folder], [prompts_for(folder, 5)], transport="memory", dtype="bfloat16")
    trace = result.trace
    sent = trace.sent_X & (trace.phase_X == TRACE_PHASES.index("dispatch"))
    assert not (trace.bytes_X[sent] % (2 * 32)).any()  # rows of 32 numbers of two bytes
    assert (trace.bytes_X[sent] % (4 * 32)).any()
    answers, prompts = result.answers_M[0], prompts_for(folder, 5)
    answers.tokens[0][1] = int(answers.logits[0][1].argmin())  # an unlikely token is no matter of precision
    options = RunOptions(max_new_tokens=4, batch=3, dtype="bfloat16")
    assert verify(result, [folder], [prompts], options) == [
        f"{name}, prompt 0: tokens {answers.tokens[0]}, expected {verified_tokens(folder, prompts[0])}"
    ]


def verified_tokens(folder, prompt):
    return greedy_decode(load_model(folder, dtype=torch.bfloat16).model, prompt, 4, 1)[0]
