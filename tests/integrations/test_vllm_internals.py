"""What the plugin says to a vLLM that it does not know, with modules that stand in for vLLM's."""

import sys
import types
from pathlib import Path

import pytest
import torch
from aurora_vllm.plugin_status import PluginStatus
from aurora_vllm.settings import Settings
from aurora_vllm.vllm_internals import api_checks, model_runner
from aurora_vllm.vllm_internals.api_checks import ApiCheck, check_api
from aurora_vllm.vllm_internals.expert_moves import _decide_more_often
from aurora_vllm.vllm_internals.hooks import install_worker_hook, prepare_worker
from aurora_vllm.vllm_internals.worker_startup import WorkerStartup, process_number
from prometheus_client import CollectorRegistry

from aurora.errors import BadInput, RankFailed


class Wrapper:
    def __init__(self, config):
        self.vllm_config, self.worker, self.ready = config, object(), 0

    def init_device(self):
        self.ready += 1


@pytest.fixture
def engine(monkeypatch):
    """A vLLM with nothing but the class that every worker is wrapped in; an installed one is out of sight."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(api_checks, "version", lambda _name: "0.32.0")
    wrapper = type("WorkerWrapperBase", (Wrapper,), {"init_device": lambda self: Wrapper.init_device(self)})
    worker_base = types.ModuleType("worker_base")
    worker_base.WorkerWrapperBase = wrapper
    platforms = types.ModuleType("platforms")
    platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: True)
    found = {"vllm": types.ModuleType("vllm"), "vllm.v1": types.ModuleType("v1"), "vllm.v1.worker": types.ModuleType("worker")}
    for name, module in {**found, "vllm.v1.worker.worker_base": worker_base, "vllm.platforms": platforms}.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    return wrapper


def config(number=0, **given):
    """Of one of four workers: two data-parallel replicas of two ranks."""
    parallel = types.SimpleNamespace(
        enable_expert_parallel=False, enable_eplb=False, data_parallel_rank=number // 2, world_size=2, rank=number % 2,
        distributed_executor_backend="mp",
    )  # fmt: skip
    model = types.SimpleNamespace(served_model_name="m")
    return types.SimpleNamespace(additional_config=given, parallel_config=parallel, model_config=model)


def test_a_check_says_what_is_missing():
    assert ApiCheck("order", "json:dumps", ("obj",)).missing() is None
    assert ApiCheck("order", "json:dumps", ("obj", "speed")).missing() == "order: json:dumps has no speed"
    assert ApiCheck("order", "json:dump_all").missing() == "order: there is no json:dump_all"
    assert ApiCheck("order", "no_such_engine:run").missing() == "order: there is no no_such_engine:run"
    assert ApiCheck("slots", "pathlib:PurePath.name", ("_tail",)).missing() in (
        None,
        "slots: pathlib:PurePath.name has no _tail",
    )


def test_unknown_and_old_versions_are_refused(monkeypatch, engine):
    with pytest.raises(
        BadInput, match=r"vLLM 0.32.0 lacks what the plugin needs: .*; placement: there is no vllm.model_executor"
    ):
        check_api("workers")
    monkeypatch.setattr(api_checks, "version", lambda _name: "0.29.1")
    with pytest.raises(BadInput, match=r"vLLM 0.29.1 is older than 0.30, the first that the plugin knows"):
        check_api("workers")


def test_the_hook_is_inert_and_put_in_once(engine, monkeypatch):
    for name in ("AURORA_PLAN", "AURORA_ORDER", "AURORA_RECORD"):
        monkeypatch.delenv(name, raising=False)
    install_worker_hook()
    hooked = engine.init_device
    install_worker_hook()
    assert engine.init_device is hooked
    worker = engine(config())
    worker.init_device()
    assert worker.ready == 1


def test_without_its_method_no_hook(engine):
    del engine.init_device, Wrapper.init_device
    try:
        install_worker_hook()
        with pytest.raises(BadInput, match=r"there is no vllm\.v1\.worker\.worker_base:WorkerWrapperBase\.init_device"):
            check_api("hook")
    finally:
        Wrapper.init_device = lambda self: setattr(self, "ready", self.ready + 1)


def test_an_engine_that_fails_a_check_is_left_alone(engine, caplog, monkeypatch):
    """It hears why, once, though all of its workers find it, and nothing is put in."""
    for number in range(4):
        monkeypatch.setattr(PluginStatus.__init__, "__defaults__", (CollectorRegistry(),))
        assert prepare_worker(config(number)) is None  # nothing is asked for, nothing is said
        assert prepare_worker(config(number, aurora={"order": "online"})) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "lacks what the plugin needs: " in caplog.text
    assert "; vLLM places experts and sends tokens as it would without the plugin" in caplog.text
    assert not [name for name in sys.modules if name.startswith("vllm.model_executor")]
    with pytest.raises(RankFailed, match=r'lacks what the plugin needs.*; the setting "required" ends'):
        prepare_worker(config(aurora={"required": True}))


@pytest.mark.parametrize("launcher", ["mp", "external_launcher"])
def test_one_process_says_what_holds_for_all(launcher, engine, caplog, monkeypatch):
    """Without expert parallelism each process is rank 0 of one; torchrun's ranks are numbered through all replicas."""
    served = types.SimpleNamespace(load=lambda: None, disable=lambda: None, plan=None)
    for number in range(4):
        monkeypatch.setattr(PluginStatus.__init__, "__defaults__", (CollectorRegistry(),))
        given = config(number)
        given.parallel_config.distributed_executor_backend = launcher
        if launcher == "external_launcher":
            given.parallel_config.world_size, given.parallel_config.rank = 4, number
        startup = WorkerStartup(Settings(), given, "another plugin has taken RoutedExperts")
        assert process_number(given.parallel_config) == number
        monkeypatch.setattr(
            startup, "_create_integration", lambda _group: types.SimpleNamespace(rank=0, ranks=1, served=served)
        )
        startup.start(None)
        model = types.SimpleNamespace(modules=list)
        patched = types.SimpleNamespace(
            integration=types.SimpleNamespace(served=served, status=None, settings=Settings()), layers=[]
        )
        patched.integration.status = PluginStatus(Settings(), "m", 0, startup._reports, CollectorRegistry())
        monkeypatch.setattr(model_runner, "find", lambda _where: {"RoutedExperts": int})
        model_runner._begin_serving(model, patched, given)
    said = [record.getMessage().partition(";")[0] for record in caplog.records]
    assert said == [
        "aurora: another plugin has taken RoutedExperts",
        "aurora: the model's experts are of a kind that the plugin does not know",
    ]


class MegaExperts(torch.nn.Module):
    """A layer's experts as MegaMoE has them: of no class of vLLM's, with weights that are no parameters once they are loaded."""

    top_k, num_logical_experts, num_local_experts, hidden_size = 2, 8, 4, 16

    def __init__(self, layer_id):
        super().__init__()
        self.layer_id, self.capture_fn = layer_id, None

    def get_expert_weights(self):
        return [torch.zeros(4, 6), torch.zeros(4, 2, dtype=torch.uint8)]


@pytest.mark.parametrize("planned", [False, True])
def test_experts_of_a_models_own_class_are_recorded_and_not_placed_by_expert_maps(planned, caplog, monkeypatch):
    begun = []
    served = types.SimpleNamespace(
        disable=lambda: begun.append("disabled"), plan=object() if planned else None, physical_LP=None, disabled=False, order="stock",
        checkpoint=types.SimpleNamespace(layers=(1, 2), fingerprint="f"),
    )  # fmt: skip
    integration = types.SimpleNamespace(
        served=served, settings=Settings(record=Path("seen")), rank=0, ranks=2, hold_gpu=None, watchdog=None,
        begin_serving=lambda facts, _name, layers, choices, _engine: begun.append((facts, layers, choices)),
    )  # fmt: skip
    integration.status = PluginStatus(integration.settings, "m", 0, True, CollectorRegistry())
    patched = types.SimpleNamespace(integration=integration, layers=[], late_LP=None)
    given = config()
    given.model_config = types.SimpleNamespace(
        served_model_name="m", model="m", dtype=torch.bfloat16,
        hf_text_config=types.SimpleNamespace(num_hidden_layers=3),
    )  # fmt: skip
    monkeypatch.setattr(model_runner, "find", lambda _where: "9.0")
    monkeypatch.setattr(model_runner, "_choice_counter", lambda *_args: "counter")
    model = torch.nn.ModuleList([torch.nn.Linear(2, 3), MegaExperts(1), MegaExperts(2)])
    model_runner._begin_serving(model, patched, given)
    if planned:
        assert begun == ["disabled"]
        assert "the model's experts are of a kind that the plugin does not know" in caplog.text
        return
    ((facts, layers, choices),) = begun
    assert (layers, choices) == ({0: 1, 1: 2}, "counter")
    assert (facts.top_k, facts.experts, facts.layers, facts.dense_layers) == (2, 8, 2, (0,))
    assert (facts.dispatch_bytes, facts.expert_bytes, facts.other_bytes) == (32, 26, 36)


@pytest.mark.parametrize(
    ("interval", "window", "passes", "counted"), [(3000, 1000, 375, 375), (300, 30, 37, 30), (32, 32, 8, 8), (4, 4, 4, 4)]
)
def test_a_placement_that_follows_decides_more_often_than_eplb(interval, window, passes, counted):
    """Eight times in an interval where that leaves a decision eight passes; loads are those since the last one."""
    model = types.SimpleNamespace(expert_load_window=torch.arange(window * 6).reshape(window, 2, 3))
    balancer = types.SimpleNamespace(
        expert_rearrangement_step=interval - interval // 4, expert_rearrangement_step_interval=interval,
        expert_load_window_size=window, model_states={"model": model},
    )  # fmt: skip
    _decide_more_often(balancer)
    assert (balancer.expert_rearrangement_step, balancer.expert_rearrangement_step_interval) == (0, passes)
    assert balancer.expert_load_window_size == len(model.expert_load_window) == counted
