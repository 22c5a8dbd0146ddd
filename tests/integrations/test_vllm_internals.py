"""What the plugin says to a vLLM that it does not know, with modules that stand in for vLLM's."""

import sys
import types

import pytest
from aurora_vllm.plugin_status import PluginStatus
from aurora_vllm.vllm_internals import api_checks
from aurora_vllm.vllm_internals.api_checks import API_CHECKS, ApiCheck, check_api
from aurora_vllm.vllm_internals.worker_hook import install_worker_hook, prepare_worker
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


def config(**given):
    parallel = types.SimpleNamespace(
        enable_expert_parallel=False, enable_eplb=False, data_parallel_rank=0, world_size=1, rank=0
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
        check_api(API_CHECKS)
    monkeypatch.setattr(api_checks, "version", lambda _name: "0.29.1")
    with pytest.raises(BadInput, match=r"vLLM 0.29.1 is older than 0.30, the first that the plugin knows"):
        check_api(API_CHECKS)


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


def test_without_its_method_no_hook(engine, caplog):
    del engine.init_device, Wrapper.init_device
    try:
        install_worker_hook()
        assert "there is no vllm.v1.worker.worker_base:WorkerWrapperBase.init_device; vLLM is left as it is" in caplog.text
    finally:
        Wrapper.init_device = lambda self: setattr(self, "ready", self.ready + 1)


def test_an_engine_that_fails_a_check_is_left_alone(engine, caplog, monkeypatch):
    """It hears why, once, and nothing is put in."""
    monkeypatch.setattr(PluginStatus.__init__, "__defaults__", (CollectorRegistry(),))
    assert prepare_worker(config()) is None
    assert not caplog.records
    assert prepare_worker(config(aurora={"order": "online"})) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "lacks what the plugin needs: " in caplog.text
    assert "; vLLM places experts and sends tokens as it would without the plugin" in caplog.text
    assert not [name for name in sys.modules if name.startswith("vllm.model_executor")]
    with pytest.raises(RankFailed, match=r'lacks what the plugin needs.*; the setting "required" ends'):
        prepare_worker(config(aurora={"required": True}))
