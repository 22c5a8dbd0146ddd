"""What the metrics say, in registries of their own and from several processes; the dashboard and the page that name them."""

import json
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("prometheus_client")
from aurora_vllm import metrics as module
from aurora_vllm import plugin_status
from aurora_vllm.metrics import Metrics, drift, exchange_bound
from aurora_vllm.plugin_status import ControlMetrics, PluginStatus
from aurora_vllm.rank_progress import RankFiles, RankProgress
from aurora_vllm.served_metrics import BUCKETS_S, PromptMetrics
from aurora_vllm.served_plan import ServedPlan
from aurora_vllm.settings import Settings
from aurora_vllm.watchdog import Watchdog
from aurora_vllm.worker_integration import WorkerIntegration
from prometheus_client import CollectorRegistry

from aurora.algorithms.network.port_bounds import fluid_bound
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import RankFailed
from aurora.io import load_plan, save
from aurora.planner.plan import make_plan
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.types import Cluster, Gpu, Network, PlanOptions, SyntheticOptions
from aurora.types.network import Servers

ROOT = Path(__file__).parents[2]
SHAPE = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
SHAPE |= {"num_hidden_layers": 2, "moe_intermediate_size": 64}
BYTES_GG = np.array([[9000, 5000], [3000, 7000]])
DECODER_LAYERS = {0: 3, 1: 4}  # after three dense layers


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    """A plan for two GPUs beside its profile, written in 2001."""
    folder = tmp_path_factory.mktemp("plan")
    profile = draw_profile("zipf:1", SHAPE, SyntheticOptions(sources=2))
    save(profile, folder / "p.npz")
    cluster = Cluster("c", tuple(Gpu(f"g{i}", "x", i, 1e6, 1e6, 10**12) for i in range(2)))
    save(make_plan(cluster, [profile], PlanOptions(), ["p.npz"]), folder / "plan.json")
    os.utime(folder / "plan.json", (1e9, 1e9))
    return folder / "plan.json"


def made(plan_file, rank=0, model_name="org/model"):
    registry = CollectorRegistry()
    plan = None if plan_file is None else load_plan(plan_file)
    return Metrics(model_name, rank, DECODER_LAYERS, plan, Settings(plan=plan_file, order="online"), registry), registry


def samples(registry):
    """Every sample's value by name and labels, without the times at which counters began."""
    found = [sample for family in registry.collect() for sample in family.samples]
    return {(each.name, tuple(sorted(each.labels.items()))): each.value for each in found if not each.name.endswith("_created")}


def value(registry, name, **labels):
    return registry.get_sample_value(name, {"model_name": "org/model", "ep_rank": "0"} | labels)


def used(metrics):
    """Gives every metric a value."""
    metrics.add_exchange("dispatch", 0.02, BYTES_GG)
    metrics.add_exchange("combine", 0.03, BYTES_GG.T)
    metrics.add_tokens(0, np.array([6, 2]))
    metrics.update_drift(np.ones((1, 2, 4), dtype=np.int64))
    metrics.refresh()


def test_drift_is_the_part_of_the_traffic_at_other_experts():
    one = np.array([[[200, 0], [100, 100]]])
    assert drift(one, 5 * one)[0] == 0
    assert drift(one, np.array([[[0, 200], [100, 100]]]))[0] == pytest.approx(0.5)
    assert drift(np.array([[[1, 0]]]), np.array([[[0, 9]]]))[0] == 1


def test_one_step_of_the_profiled_traffic_is_no_drift():
    """Eight tokens over 128 experts are far from any profile: 0.78 by counting, and as far by chance alone."""
    rng = np.random.default_rng(1)
    share_LE = rng.dirichlet(np.full(128, 0.3), 48)
    planned_TLE = rng.multinomial(64, np.broadcast_to(share_LE, (30, 48, 128)))
    for tokens in (8, 100, 10_000):
        apart, chance = drift(rng.multinomial(tokens, share_LE)[None], planned_TLE)
        assert apart <= 1.05 * chance
        moved, chance = drift(rng.multinomial(tokens, np.roll(share_LE, 1, axis=1))[None], planned_TLE)
        assert moved - chance > (0 if tokens == 8 else 0.2)


def test_tokens_that_choose_alike_count_as_fewer():
    """Each window has one request, which goes to few experts; independent tokens of the same loads differ less by chance."""
    rng = np.random.default_rng(1)

    def windows(count):
        own_TLE = rng.dirichlet(np.full(16, 0.5), (count, 4))
        return rng.multinomial(200, own_TLE)

    alike, planned = windows(30), windows(30)
    apart, chance = drift(alike, planned)
    assert apart < 1.2 * chance
    assert drift(alike.sum(axis=0, keepdims=True), planned.sum(axis=0, keepdims=True))[1] < chance / 2


def test_every_metric_names_model_and_rank(plan_file):
    metrics, registry = made(plan_file)
    assert not {"aurora_plan_drift", "aurora_expert_balancedness"} & {name for name, _ in samples(registry)}, "not measured yet"
    used(metrics)
    found = samples(registry)
    assert {name for name, _ in found} == sample_names(registry)
    for name, labels in found:
        assert {"model_name": "org/model", "ep_rank": "0"}.items() <= dict(labels).items(), name
    assert value(registry, "aurora_plan_timestamp_seconds") == 1e9


def test_exchanges_are_counted_timed_and_compared_with_their_bound(plan_file):
    metrics, registry = made(plan_file)
    for seconds in (5e-5, 0.02, 0.02, 3.0):
        metrics.add_exchange("dispatch", seconds, BYTES_GG)
    assert value(registry, "aurora_exchange_bytes_total", phase="dispatch") == 4 * 5000
    bound_s = 4 * fluid_bound(np.array([[0, 5000], [3000, 0]]), load_plan(plan_file).cluster.network)
    assert value(registry, "aurora_exchange_bound_seconds_total", phase="dispatch") == pytest.approx(bound_s)
    assert value(registry, "aurora_exchange_gap", phase="dispatch") == pytest.approx(3.04005 / bound_s - 1)
    for name in ("aurora_exchange_seconds_total", "aurora_exchange_duration_seconds_sum"):
        assert value(registry, name, phase="dispatch") == pytest.approx(3.04005)
    name = "aurora_exchange_duration_seconds_bucket"
    counts = [value(registry, name, phase="dispatch", le=str(le)) for le in (*BUCKETS_S, "+Inf")]
    assert counts == [sum(seconds <= le for seconds in (5e-5, 0.02, 0.02, 3.0)) for le in (*BUCKETS_S, np.inf)]
    assert (BUCKETS_S[0], BUCKETS_S[-1]) == (1e-4, 1.0)
    assert value(registry, "aurora_exchange_duration_seconds_count", phase="combine") == 0


def test_balancedness_is_mean_over_max_and_only_layers_with_traffic_have_it(plan_file, monkeypatch):
    """Passes since the last refresh count, each with its own busiest GPU."""
    metrics, registry = made(plan_file)
    metrics.add_tokens(0, np.array([6, 2]))
    metrics.add_tokens(0, np.array([0, 4]))
    metrics.add_tokens(1, np.array([0, 0]))  # warm-up
    metrics.refresh()
    assert value(registry, "aurora_expert_balancedness", layer="3") == (4 + 2) / (6 + 4)
    assert value(registry, "aurora_layer_tokens_total", layer="3") == 6
    assert value(registry, "aurora_expert_balancedness", layer="4") is None
    metrics.add_tokens(0, np.array([5, 5]))
    metrics.refresh()
    assert value(registry, "aurora_expert_balancedness", layer="3") == 0.6, "too early"
    monkeypatch.setattr(module, "REFRESH_S", 0)
    metrics.refresh()
    assert value(registry, "aurora_expert_balancedness", layer="3") == 1
    metrics.refresh()
    assert value(registry, "aurora_expert_balancedness", layer="3") == 1, "no traffic changes nothing"
    assert value(registry, "aurora_layer_tokens_total", layer="3") == 11


def test_without_a_plan_there_is_neither_bound_nor_drift():
    metrics, registry = made(None)
    used(metrics)
    names = {name for name, _ in samples(registry)}
    assert "aurora_exchange_duration_seconds_bucket" in names
    assert "aurora_expert_balancedness" in names
    without = {
        "aurora_exchange_bound_seconds_total",
        "aurora_exchange_gap",
        "aurora_plan_drift",
        "aurora_plan_drift_chance",
        "aurora_plan_drift_tokens",
        "aurora_plan_timestamp_seconds",
    }
    assert not without & names


def test_a_worker_counts_what_each_gpu_computes_of_real_tokens():
    """Experts 0 and 1 are on rank 0, the others on rank 1. Rank 1 has no tokens of its own, but pads a batch to keep company."""
    memory, registries = Memory(2, 10.0), [CollectorRegistry(), CollectorRegistry()]
    index = torch.tensor([[0, 1], [0, 2], [2, 3]], dtype=torch.int32)  # the last row is padding

    def serve(rank):
        integration = WorkerIntegration(Settings(order="online"), rank, 2, None, None)
        integration.metrics = Metrics("m", rank, {0: 7}, None, integration.settings, registries[rank])
        integration.connect(lambda: MemoryTransport(memory, rank))
        with integration.forward_pass((2, 0)[rank]), integration.moe_layer(0, index, False):
            rows, weights, _ = integration.dispatch(torch.ones(3, 4), torch.ones(3, 2), index, lambda _: ((0, 1), (2, 3)))
            integration.combine(rows * weights.sum(dim=1, keepdim=True))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(serve, range(2)))
    for rank, (registry, tokens, exchanges) in enumerate(zip(registries, (3, 1), (1, 0), strict=True)):
        labels = {"model_name": "m", "ep_rank": str(rank)}
        assert registry.get_sample_value("aurora_layer_tokens_total", labels | {"layer": "7"}) == tokens
        assert registry.get_sample_value("aurora_expert_balancedness", labels | {"layer": "7"}) == 2 / 3
        counted = registry.get_sample_value("aurora_exchange_duration_seconds_count", labels | {"phase": "dispatch"})
        assert counted == exchanges, "of passes with tokens of this rank's own"


@pytest.mark.parametrize(("given", "listens"), [({}, "127.0.0.1"), ({"metrics_host": "0.0.0.0"}, "0.0.0.0")])
def test_metrics_are_served_on_loopback_unless_asked_otherwise(monkeypatch, given, listens):
    started = []
    monkeypatch.setattr(
        plugin_status, "start_http_server", lambda port, addr="0.0.0.0", registry=None: started.append((port, addr))
    )
    PluginStatus(Settings(order="online", metrics_port=9100, **given), "m", 1, False, CollectorRegistry())
    assert started == [(9101, listens)]


def test_a_port_that_is_taken_costs_metrics_only(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(order="online", metrics_port=taken.getsockname()[1])
        PluginStatus(settings, "m", 0, True, CollectorRegistry()).engaged("m by vLLM")
    assert "aurora: no metrics: " in caplog.text


@pytest.mark.parametrize(("shared_nic", "bound_s"), [(False, 5.0), (True, 8.0)])
def test_the_bound_of_an_exchange_between_servers_is_that_of_their_nics(shared_nic, bound_s):
    """Ports of 2 B/s and NICs of 1 B/s; rank 0 sends 9 B inside its server, and 5 B to the other, rank 1 sends 3 B there."""
    ports_G = np.full(4, 2.0)
    network = Network(ports_G, ports_G, servers=Servers.of([7, 7, 3, 3], 1.0, shared_nic))
    bytes_GG = np.array([[0, 9, 5, 0], [0, 0, 0, 3], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert exchange_bound(bytes_GG, network) == bound_s
    assert exchange_bound(bytes_GG * [[1, 1, 0, 0]], network) == 4.5
    assert exchange_bound(bytes_GG, replace(network, servers=None)) == 7.0


def engaged(registry, rank, reason):
    return registry.get_sample_value("aurora_engaged", {"model_name": "m", "ep_rank": str(rank), "reason": reason})


def test_success_is_said_once_and_shown_by_every_rank(caplog):
    caplog.set_level("INFO", "vllm.aurora")
    for rank in range(2):
        registry = CollectorRegistry()
        PluginStatus(Settings(), "m", rank, rank == 0, registry).engaged("m on 2 ranks: by plan.json")
        assert engaged(registry, rank, "") == 1
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "aurora: m on 2 ranks: by plan.json")
    ]


def test_standing_aside_is_shown_with_its_reason_and_ends_a_server_that_requires_the_plugin(caplog):
    registry = CollectorRegistry()
    PluginStatus(Settings(), "m", 0, True, registry).report_disabled("the plan is for 4 ranks")
    assert engaged(registry, 0, "the plan is for 4 ranks") == 0
    assert "the plan is for 4 ranks; vLLM places experts and sends tokens as it would" in caplog.text
    caplog.clear()
    PluginStatus(Settings(), "m", 1, False, CollectorRegistry()).report_disabled("the plan is for 4 ranks", report_here=False)
    assert not caplog.records
    with pytest.raises(RankFailed, match=r'the plan is for 4 ranks; the setting "required" ends a server'):
        PluginStatus(Settings(required=True), "m", 0, True, CollectorRegistry()).report_disabled("the plan is for 4 ranks")


def test_what_falls_short_is_not_engaged_though_it_serves(caplog):
    registry = CollectorRegistry()
    status = PluginStatus(Settings(), "m", 0, True, registry)
    status.report_degraded("nothing is recorded: no buffer")
    status.engaged("m by plan.json")
    assert engaged(registry, 0, "nothing is recorded: no buffer") == 0
    assert engaged(registry, 0, "") is None
    assert [record.getMessage() for record in caplog.records] == ["aurora: nothing is recorded: no buffer"]


def test_what_serves_by_what_is_one_sentence(plan_file):
    served = ServedPlan(Settings(plan=plan_file, order="plan", record=Path("seen")), 0, 2, None, None)
    served.plan = load_plan(plan_file)
    os.utime(plan_file, (time.time() - 3 * 86400,) * 2)
    try:
        assert served.summary() == (
            f"{plan_file}, written 3.0 days ago, places the experts by expert maps, all-to-alls in the plan's order, a record in seen every 60 s"
        )
    finally:
        os.utime(plan_file, (1e9, 1e9))
    served.disable()
    assert (
        ServedPlan(Settings(order="stock"), 0, 2, None, None).summary()
        == "vLLM places the experts, all-to-alls by vLLM, no record"
    )


def sample_names(registry):
    """Names of all metrics that can be exported, by the name that the documentation gives them."""
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {family.name + ending for family in registry.collect() for ending in endings[family.type]}


def test_the_page_names_every_metric_and_no_other():
    pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM")
    from aurora_vllm.ranks_metrics import MetricsPage
    from aurora_vllm.serving_changes import ServingChanges

    _, registry = made(None)
    registry.register(MetricsPage({}, ServingChanges(1.0)))
    PluginStatus(Settings(), "m", 0, True, registry)
    ControlMetrics("m", 0, registry)
    PromptMetrics("m", 0, registry)
    Watchdog(0, RankProgress(), RankFiles(ROOT, []), True, "m", registry=registry).end()
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    documented = dict(re.findall(r"^\| `(aurora_\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert documented == {
        family.name + ("_total" if family.type == "counter" else ""): family.type for family in registry.collect()
    }


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(plan_file):
    metrics, registry = made(plan_file)
    used(metrics)
    PluginStatus(Settings(), "org/model", 0, True, registry).engaged("by vLLM")
    control = ControlMetrics("org/model", 0, registry)
    control.beat()
    decision = SimpleNamespace(kind="gain", balancedness=0.8, expected_balancedness=0.9)
    control.tell(decision, False)
    control.moved(1000, 0.1)
    dashboard = json.loads((ROOT / "integrations" / "grafana.json").read_text())
    source = {"type": "prometheus", "uid": "${datasource}"}
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["datasource"] == source for panel in panels)
    assert all(target["datasource"] == source for panel in panels for target in panel["targets"])
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [each["query"]["query"] for each in variables.values() if each["type"] == "query"]
    labels_of = {}
    for name, labels in samples(registry):
        labels_of.setdefault(name, set()).update(dict(labels))
    asked = {name for query in queries for name in re.findall(r"aurora_\w+", query)}
    assert asked <= labels_of.keys()
    families = {family.name: family.type for family in registry.collect()}
    shown = {family for family in families if any(name.startswith(family) for name in asked)}
    assert families.keys() - shown <= {"aurora_exchange_gap"}, "which the dashboard computes for the interval that it shows"
    for query in queries:
        known = set.union(*(labels_of[name] for name in re.findall(r"aurora_\w+", query)))
        grouped = {label for group in re.findall(r"by \(([\w, ]+)\)", query) for label in group.split(", ")}
        assert grouped <= known, query
        assert set(re.findall(r"\$(\w+)", query)) <= {*variables, "__rate_interval", "1"}, query
        assert query.startswith("label_values") or query.count("aurora_") == query.count("{"), query
        assert query.count("(") == query.count(")")
