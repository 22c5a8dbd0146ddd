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
from aurora_vllm.vllm_internals.worker import prepare_worker, worker_class
from aurora_vllm.vllm_internals.worker_startup import WorkerStartup, process_number
from prometheus_client import CollectorRegistry

from aurora.errors import BadInput, RankFailed


@pytest.fixture
def engine(monkeypatch):
    """A vLLM with nothing but its platform; an installed one is out of sight."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(api_checks, "version", lambda _name: "0.32.0")
    platforms = types.ModuleType("platforms")
    platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: True)
    for name, module in {"vllm": types.ModuleType("vllm"), "vllm.platforms": platforms}.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)


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


class VllmWorker:
    """vLLM's worker: it notes what it is asked for."""

    def __init__(self, vllm_config):
        self.vllm_config, self.model_runner, self.asked = vllm_config, None, []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *given: self.asked.append((name, *given))


for method in (
    "init_device",
    "load_model",
    "compile_or_warm_up_model",
    "execute_model",
    "sample_tokens",
    "execute_dummy_batch",
    "shutdown",
):
    setattr(VllmWorker, method, lambda self, *given, method=method: self.asked.append((method, *given)))


@pytest.mark.parametrize("given", [{}, {"aurora": {"order": "online"}}])
def test_a_worker_without_settings_or_of_a_vllm_that_fails_a_check_is_vllms(given, engine, monkeypatch):
    for name in ("AURORA_PLAN", "AURORA_ORDER", "AURORA_RECORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(PluginStatus.__init__, "__defaults__", (CollectorRegistry(),))
    made = worker_class(VllmWorker)(config(**given))
    calls = [
        ("init_device",), ("load_model",), ("compile_or_warm_up_model",), ("execute_model", 1), ("sample_tokens", 2),
        ("execute_dummy_batch",), ("shutdown",),
    ]  # fmt: skip
    for name, *words in calls:
        getattr(made, name)(*words)
    assert made.asked == calls
    made.ranks_changed([0], [0])
    with pytest.raises(BadInput, match="found vLLM without it"):
        made.aurora("stop")


def test_an_engine_that_fails_a_check_is_left_alone(engine, caplog, monkeypatch):
    """It hears why, once, though all of its workers find it, and nothing is put in."""
    for number in range(4):
        monkeypatch.setattr(PluginStatus.__init__, "__defaults__", (CollectorRegistry(),))
        assert prepare_worker(Settings(order="online"), config(number)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "lacks what the plugin needs: " in caplog.text
    assert "; vLLM places experts and sends tokens as it would without the plugin" in caplog.text
    assert not [name for name in sys.modules if name.startswith("vllm.model_executor")]
    with pytest.raises(RankFailed, match=r'lacks what the plugin needs.*; the setting "required" ends'):
        prepare_worker(Settings(required=True), config())


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
        assert not startup.start()
        model = types.SimpleNamespace(modules=list)
        patched = types.SimpleNamespace(
            integration=types.SimpleNamespace(served=served, status=None, settings=Settings()), layers=[]
        )
        patched.integration.status = PluginStatus(Settings(), "m", 0, startup._reports, CollectorRegistry())
        monkeypatch.setattr(model_runner, "find", lambda _where: {"RoutedExperts": int})
        model_runner.begin_serving(model, patched, given)
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
        served=served, settings=Settings(record=Path("seen")), rank=0, ranks=2, watchdog=None,
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
    model_runner.begin_serving(model, patched, given)
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
