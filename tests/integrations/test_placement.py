"""How the plugin has vLLM place a plan's experts: through EPLB, through an expert map where that is honoured, or not at all."""

import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from aurora_vllm.served_plan import ServedPlan, served_hierarchy
from aurora_vllm.settings import Settings
from aurora_vllm.vllm_internals import api_checks, hooks, worker_startup
from aurora_vllm.vllm_internals.conditions import PART, PLUGIN, Asked, check_conditions, effective_settings, unmet
from aurora_vllm.vllm_internals.eplb_policy import place_experts, policy_class
from aurora_vllm.vllm_internals.hooks import set_redundant_experts
from aurora_vllm.vllm_internals.patches import PatchedWorker, check_all_fused, check_kernel
from aurora_vllm.vllm_internals.worker_startup import WorkerStartup

from aurora.errors import BadInput
from aurora.types import Hierarchy, Placement, Servers

LOAD_LE = np.array([[9, 1, 1, 1], [1, 5, 1, 5]])
UNEVEN = Placement((((0, 1, 2), (3,)), ((0, 1), (2, 3))))


def served(placement, rank=0, redundant=None):
    """A ServedPlan with a plan of this placement, given to EPLB if `redundant` is not None."""
    made = ServedPlan(Settings(), rank, 2, None, 4)
    model = SimpleNamespace(placement=placement, load_LE=LOAD_LE)
    made.plan = SimpleNamespace(models=(model,), cluster=SimpleNamespace(equal=True))
    if redundant is not None:
        assert made.place_physical_experts(redundant) is None
    return made


def test_unequal_counts_become_equal_by_replicas():
    found = served(UNEVEN, redundant=2)
    assert found.physical_LP[0].tolist() == [0, 1, 2, 0, 1, 3]  # the hottest takes a part of its load to the other GPU
    for physical_P, held_G in zip(found.physical_LP, UNEVEN.slots_LG, strict=True):
        for rank, held in enumerate(held_G):
            assert set(held) <= set(physical_P[3 * rank : 3 * rank + 3].tolist())
    assert found.local_experts(0) is None  # vLLM's own map of physical experts stays


@pytest.mark.parametrize("redundant", [0, 1, 3, 6])
def test_a_number_of_redundant_experts_that_does_not_fit_is_said(redundant):
    expected = f"the plan needs --eplb-config.num_redundant_experts 2, found {redundant}"
    assert served(UNEVEN).place_physical_experts(redundant) == expected


def test_without_eplb_each_rank_has_its_own():
    assert [served(UNEVEN, rank).local_experts(0) for rank in range(2)] == [(0, 1, 2), (3,)]


def test_after_a_refusal_nothing_is_placed():
    found = served(UNEVEN, redundant=2)
    found.disable()
    assert found.physical_experts(0) is None
    assert found.local_experts(0) is None


class Platform:
    device_name = "npu"

    def __init__(self, kind, capability=90):
        self._kind, self._capability = kind, capability

    def is_cpu(self):
        return self._kind == "cpu"

    def is_cuda(self):
        return self._kind == "cuda"

    def has_device_capability(self, capability):
        return self._capability >= capability


def config(**given):
    usual = {"back_end": "allgather_reducescatter", "quantization": None, "kernel": "auto", "eplb": False, "filter": False}
    given = usual | given
    return SimpleNamespace(
        use_v2_model_runner=given.get("v2", False),
        parallel_config=SimpleNamespace(
            enable_expert_parallel=True, data_parallel_size=2, all2all_backend=given["back_end"], enable_eplb=given["eplb"],
            eplb_config=SimpleNamespace(num_redundant_experts=2), enable_ep_weight_filter=given["filter"], tensor_parallel_size=1,
            pipeline_parallel_size=given.get("stages", 1), use_ubatching=given.get("dbo", False),
            enable_elastic_ep=given.get("elastic", False),
        ),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=given.get("returned", False)),
        load_config=SimpleNamespace(load_format=given.get("load_format", "auto")),
        model_config=SimpleNamespace(quantization=given["quantization"], architectures=[given.get("architecture", "Some")]),
        kernel_config=SimpleNamespace(moe_backend=given["kernel"]),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name=given.get("graphs", "NONE"))),
    )  # fmt: skip


def use(platform, monkeypatch):
    """Has the platform stand in for vLLM's, in a vLLM that has all that the plugin needs."""
    module = types.ModuleType("vllm.platforms")
    module.current_platform = platform
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    monkeypatch.setattr(api_checks, "check_api", lambda *_names: None)


def refusal(monkeypatch, platform, placement=UNEVEN, **given):
    use(platform, monkeypatch)
    found = served(placement)
    found.load = lambda: None
    return next(unmet(Asked(Settings(plan="plan.json"), config(**given), found), *PLUGIN), None)


@pytest.mark.parametrize(
    ("platform", "given", "found"),
    [
        (Platform("cpu"), {}, None),
        (Platform("cuda"), {}, None),
        (Platform("cuda", 100), {"kernel": "triton"}, None),
        (Platform("cuda", 100), {}, "--moe-backend auto"),
        (Platform("cuda"), {"kernel": "flashinfer_cutlass"}, "--moe-backend flashinfer_cutlass"),
        (Platform("cuda"), {"back_end": "deepep_low_latency"}, "--all2all-backend deepep_low_latency"),
        (Platform("cuda"), {"quantization": "fp8"}, "fp8 experts"),
    ],
)
def test_expert_maps_only_where_they_are_honoured(platform, given, found, monkeypatch):
    """Kernels and back ends that divide experts by rank would answer wrongly without a word; EPLB works with all of them."""
    said = refusal(monkeypatch, platform, **given)
    assert (said is None) == (found is None)
    if found is not None:
        assert said == f"a plan without --enable-eplb needs unquantized experts and --moe-backend triton, found {found}"
        assert refusal(monkeypatch, platform, eplb=True, **given) is None


REPLICAS = Placement((((0, 1, 2), (0, 3)), ((0, 1), (2, 3))), (((0.5, 1.0, 1.0), (0.5, 1.0)), ((1.0, 1.0), (1.0, 1.0))))
IN_SEQUENCE = "a plan needs weights that are loaded expert by expert, found a model whose ranks read theirs in sequence"
FORMAT = "a plan needs weights in the checkpoint's own form, found --load-format sharded_state"
FILTER = "a plan without --enable-eplb needs all weights read, found --enable-ep-weight-filter"


@pytest.mark.parametrize(
    ("platform", "placement", "given", "found", "with_eplb"),
    [
        ("cuda", UNEVEN, {"architecture": "GptOssForCausalLM"}, IN_SEQUENCE, None),
        ("rocm", UNEVEN, {}, *["plan, adapt: expected CUDA GPUs or CPUs, found npu"] * 2),
        ("cuda", UNEVEN, {"load_format": "sharded_state"}, FORMAT, FORMAT),  # which restores each rank's own state
        ("cuda", UNEVEN, {"filter": True}, FILTER, None),  # by which vLLM reads only the experts of its own map
        ("cpu", REPLICAS, {}, "the plan's replicas need --enable-eplb", None),
    ],
)
def test_a_plan_that_would_leave_wrong_weights_is_refused(platform, placement, given, found, with_eplb, monkeypatch):
    assert refusal(monkeypatch, Platform(platform), placement, **given) == found
    assert refusal(monkeypatch, Platform(platform), placement, eplb=True, **given) == with_eplb


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, None),
        ({"stages": 2, "quantization": "fp8"}, None),
        ({"eplb": True, "stages": 2}, "adapt: expected no pipeline parallelism"),
        ({"eplb": True, "elastic": True}, "plan, adapt: expected no --enable-elastic-ep"),
        ({"eplb": True, "dbo": True, "back_end": "deepep_low_latency"}, None),
    ],
)
def test_experts_follow_the_traffic_only_where_they_can(given, found, monkeypatch):
    use(Platform("cuda"), monkeypatch)
    said = next(unmet(Asked(Settings(adapt=True), config(**given)), *PLUGIN), None)
    assert (said is None) == (found is None)
    assert found is None or said.startswith(found)


@pytest.mark.parametrize(
    ("settings", "given", "found"),
    [
        ({"order": "push"}, {}, "order push: expected GPUs of one machine that NVLink connects, each to each, found CPUs"),
        ({"order": "online"}, {"dbo": True}, "order: expected no micro-batches"),
        ({"record": Path("seen")}, {"dbo": True}, "record: expected no micro-batches"),
        ({"order": "online"}, {"back_end": "deepep_low_latency"}, "order: expected expert and data parallelism by allgather"),
        ({"adapt": True}, {}, "adapt: expected --enable-eplb, found none"),
    ],
)
def test_a_part_that_is_off_is_said_by_workers_and_ends_a_server_that_requires_it(settings, given, found, monkeypatch):
    use(Platform("cpu"), monkeypatch)
    asked = Asked(Settings(**settings), config(**given))
    said = next(unmet(asked, *PART))
    assert said.startswith(found)
    assert (effective_settings(asked).order, effective_settings(asked).record) == ("stock", None)
    check_conditions(asked.settings, asked.config)
    with pytest.raises(BadInput, match=found):
        check_conditions(Settings(required=True, **settings), asked.config)


@pytest.mark.parametrize(
    ("eplb", "given", "ranks", "experts", "found"),
    [(True, 0, 2, 4, 2), (True, 4, 2, 4, 4), (False, 0, 2, 4, 0), (True, 0, 4, 4, 0), (True, 0, 2, 8, 0)],
    ids=["needed", "given", "without-eplb", "other-ranks", "other-model"],
)
def test_redundant_experts_are_set_before_workers_start(eplb, given, ranks, experts, found, monkeypatch):
    plan = SimpleNamespace(models=(SimpleNamespace(placement=UNEVEN),))
    monkeypatch.setattr(hooks, "load_plan", lambda _path: plan)
    parallel = SimpleNamespace(
        enable_expert_parallel=True, enable_eplb=eplb, eplb_config=SimpleNamespace(num_redundant_experts=given), tensor_parallel_size=1, data_parallel_size=ranks
    )  # fmt: skip
    model = SimpleNamespace(get_num_experts=lambda: experts)
    set_redundant_experts(SimpleNamespace(parallel_config=parallel, model_config=model), Path("plan.json"))
    assert parallel.eplb_config.num_redundant_experts == found


@pytest.mark.parametrize(("name", "honours"), [("TritonExperts", True), ("FlashInferExperts", False), ("TrtLlmExperts", False)])
def test_a_kernel_that_is_not_known_ends_the_server_before_it_answers(name, honours):
    method = SimpleNamespace(experts_cls=type(name, (), {}))
    if honours:
        check_kernel(method)
    else:
        with pytest.raises(
            BadInput, match=f"experts placed by aurora need vLLM's Triton kernel or --enable-eplb, found {name}"
        ):
            check_kernel(method)


@pytest.mark.parametrize(
    ("settings", "graphs", "back_end", "used", "kept"),
    [
        ({}, "FULL_AND_PIECEWISE", "allgather_reducescatter", "stock", True),
        ({"order": "push"}, "FULL_AND_PIECEWISE", "allgather_reducescatter", "push", True),
        ({"order": "plan"}, "FULL_AND_PIECEWISE", "allgather_reducescatter", "plan", False),
        ({"order": "online"}, "FULL_AND_PIECEWISE", "allgather_reducescatter", "online", False),
        ({"order": "plan", "all_to_all": "hierarchical"}, "FULL_AND_PIECEWISE", "deepep_low_latency", "stock", True),
    ],
)
def test_cuda_graphs_stay_unless_messages_are_asked_for(settings, graphs, back_end, used, kept, monkeypatch, caplog):
    """That is told. By default, and where there is nothing to order, all-to-alls are vLLM's own."""
    use(Platform("cuda"), monkeypatch)
    given = config(graphs=graphs, back_end=back_end)
    given.parallel_config.distributed_executor_backend = "mp"
    given.parallel_config.data_parallel_rank = given.parallel_config.rank = given.parallel_config.world_size = 0
    startup = WorkerStartup(Settings(plan="plan.json", **settings), given, None)
    assert startup._settings.order == used
    for name in ("patch_routed_experts", "patch_all2all_manager"):
        monkeypatch.setattr(worker_startup, name, lambda _patched: None)
    turned_off = []
    monkeypatch.setattr(worker_startup, "disable_cuda_graphs", turned_off.append)
    startup.install_patches()
    said = "aurora: CUDA graphs are off: the sizes of ordered messages are known on the host alone"
    assert (turned_off == []) is kept is (said not in caplog.text)


@pytest.mark.parametrize(
    ("planned", "servers", "given", "found"),
    [
        (None, (0, 0, 1, 1), {"order": "plan"}, None),
        (3, (0, 0, 1, 1), {"order": "plan"}, 3),
        (3, (0, 0, 1, 1), {"order": "online"}, 3),
        (3, (0, 0, 1, 1), {"order": "plan", "all_to_all": "flat"}, None),
        (3, (0, 0, 1, 1), {"all_to_all": "flat"}, None),
        (3, (0, 0, 1, 1), {}, None),
        (3, (0, 0, 1, 1), {"order": "plan", "all_to_all": "hierarchical"}, 3),
        (None, (0, 0, 1, 1), {"order": "plan", "all_to_all": "hierarchical"}, 4),
        (None, (0, 0, 0, 0), {"order": "plan", "all_to_all": "hierarchical"}, "found none"),
        (None, None, {"order": "online", "all_to_all": "hierarchical"}, "found none"),
    ],
)
def test_alltoalls_are_as_planned_unless_the_settings_say_otherwise(planned, servers, given, found):
    """The number of chunks in which they go over the servers; None: flat. A server needs another."""
    hierarchy = None if planned is None else Hierarchy(np.array(servers), planned)
    over = None if servers is None else Servers(servers, 1.0)
    plan = SimpleNamespace(models=(SimpleNamespace(hierarchy=hierarchy),), cluster=SimpleNamespace(servers=over))
    settings = Settings(plan=Path("plan.json"), **given)
    if isinstance(found, str):
        with pytest.raises(
            BadInput, match=r"all_to_all: expected a plan for a cluster with a \[fabric\] of several servers, found none"
        ):
            served_hierarchy(plan, settings)
        return
    made = served_hierarchy(plan, settings)
    assert (made and made.chunks) == found
    assert made is None or made.server_G.tolist() == list(servers)


class Policy:
    """vLLM's own policy."""

    @classmethod
    def rebalance_experts(cls, weight, *_args, **_named):
        return torch.full((len(weight), 6), 7)


class State:
    """vLLM's EPLB state, of models by their hash."""

    def __init__(self, **layers_of):
        self.model_states = {
            name: SimpleNamespace(
                model=SimpleNamespace(moe_layers=layers),
                physical_to_logical_map=torch.tensor([[0, 1, 2, 3, 0, 1]] * len(layers)),
            )
            for name, layers in layers_of.items()
        }

    def update_mapping(self, model_config, expanded_physical_to_logical):
        self.model_states[model_config.compute_hash()].physical_to_logical_map.copy_(expanded_physical_to_logical)


@pytest.fixture
def planned():
    """(state of a worker with a plan, the policy that vLLM asks)."""
    worker = PatchedWorker(SimpleNamespace(model_config=SimpleNamespace(compute_hash=lambda: "hash")))
    worker.integration = SimpleNamespace(served=served(UNEVEN, redundant=2))
    return worker, policy_class(Policy, worker)


def layer(physical_P):
    return SimpleNamespace(routed_experts=SimpleNamespace(planned_physical_P=physical_P))


def test_eplb_begins_with_the_plan_and_keeps_it(planned):
    """Layers that the plan does not know keep vLLM's map; without a plan EPLB is vLLM's own."""
    worker, policy = planned
    state = State(hash=[layer(worker.integration.served.physical_experts(0)), layer(None)])
    place_experts(worker, state)
    map_LP = state.model_states["hash"].physical_to_logical_map
    assert map_LP.tolist() == [[0, 1, 2, 0, 1, 3], [0, 1, 2, 3, 0, 1]]
    kept_LP = policy.rebalance_experts(torch.ones(2, 4), 6, 1, 1, 2, map_LP)
    assert kept_LP.tolist() == map_LP.tolist()
    assert kept_LP is not map_LP
    worker.integration.served.disable()
    assert policy.rebalance_experts(torch.ones(2, 4), 6, 1, 1, 2, map_LP).tolist() == [[7] * 6] * 2


@pytest.mark.parametrize("fused", [True, False])
def test_experts_that_are_loaded_together_move_to_the_plan_at_the_first_rearrangement(fused, planned):
    """Fused weights, and experts of a class of the model's own as MegaMoE's; a draft model's stay as vLLM has them."""
    worker, policy = planned
    planned_LP = worker.integration.served.physical_LP
    fused_experts = SimpleNamespace(planned_physical_P=None, aurora_fused=True)
    moe = SimpleNamespace(routed_experts=fused_experts) if fused else SimpleNamespace()
    place_experts(worker, State(draft=[moe] * 2))
    assert worker.late_LP is None
    state = State(hash=[moe] * 2)
    place_experts(worker, state)
    map_LP = state.model_states["hash"].physical_to_logical_map
    assert map_LP.tolist() == [[0, 1, 2, 3, 0, 1]] * 2, "vLLM's"
    for held_LP in (map_LP, torch.from_numpy(planned_LP)):
        next_LP = policy.rebalance_experts(torch.ones(2, 4), 6, 1, 1, 2, held_LP)
        assert next_LP.tolist() == planned_LP.tolist()


def test_weights_of_several_experts_and_of_one_do_not_mix():
    """A layer's weights are all of one expert each, or all fused."""
    one, fused = torch.zeros(3, 2), torch.zeros(4, 3, 2)
    for first, then in ((one, fused), (fused, one)):
        check_all_fused(first, None, "model.layers.1.mlp.experts")
        check_all_fused(first, first.ndim > 2, "model.layers.1.mlp.experts")
        with pytest.raises(BadInput, match=r"model\.layers\.1\.mlp\.experts: .* found both"):
            check_all_fused(then, first.ndim > 2, "model.layers.1.mlp.experts")


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({}, None),
        ({"enable_expert_parallel": False, "world_size": 2}, "record: several ranks record with --enable-expert-parallel only"),
        ({"enable_expert_parallel": False}, None),
        ({"pipeline_parallel_size": 2}, "record: expected no pipeline parallelism"),
    ],
)
def test_records_that_would_lack_tokens_are_refused(tmp_path, given, refusal):
    sizes = {"enable_expert_parallel": True, "world_size": 1, "data_parallel_size": 1, "pipeline_parallel_size": 1}
    parallel = SimpleNamespace(**sizes | given)
    found = next(unmet(Asked(Settings(record=tmp_path), SimpleNamespace(parallel_config=parallel)), *PLUGIN), None)
    assert found is None if refusal is None else found.startswith(refusal)
