"""What users ask the vLLM plugin for, and what they hear when it cannot be."""

import os
import sys
import types
from pathlib import Path

import pytest
from aurora_vllm.settings import Settings, check_files, misspelt, read_settings
from aurora_vllm.vllm_internals import api_checks, hooks
from aurora_vllm.vllm_internals.replaced import replaced, restore

from aurora.errors import BadInput


def test_nothing_asked_is_nothing():
    assert read_settings(None, {"AURORA_DATA": "elsewhere", "PATH": "/bin"}) is None


def test_an_empty_object_asks_for_the_defaults():
    assert read_settings({}, {}) == Settings()


def test_a_plan_places_experts_and_leaves_the_all_to_all():
    assert read_settings({"plan": "p.json"}, {}) == Settings(plan=Path("p.json"), order="stock")


def test_variables_fill_what_the_configuration_leaves_out():
    environ = {"AURORA_ORDER": "online", "AURORA_RECORD": "seen", "AURORA_RECORD_EVERY_S": "2.5", "AURORA_METRICS_PORT": "9100"}
    assert read_settings(None, environ) == Settings(order="online", record=Path("seen"), record_every_s=2.5, metrics_port=9100)
    assert read_settings({"order": "stock"}, environ).order == "stock"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"paln": "p.json"}, r"additional_config: aurora knows no 'paln'; expected plan$"),
        ({"speed": 3}, r"additional_config: aurora knows no 'speed'; expected plan, order"),
        ({"required": "perhaps"}, "required: expected true or false, found 'perhaps'"),
        ([1], r'expected "aurora" to be an object, found \[1\]'),
        ({"order": "random"}, "`order`: expected one of plan, online, push, stock, found 'random'"),
        ({"order": "plan"}, 'order: expected a plan for "plan", found none'),
        (
            {"order": "push", "all_to_all": "hierarchical", "plan": "p"},
            "all_to_all: expected the order plan or online, .* 'push'",
        ),
        ({"all_to_all": "hierarchical", "plan": "p.json"}, "all_to_all: expected the order plan or online, .* found 'stock'"),
        ({"plan": 3}, "plan: expected a path, found 3"),
        ({"plan": None}, "plan: expected a path, found null; leave the name out for the default"),
        ({"record_every_s": 0}, "`record_every_s`: expected more than zero, found 0"),
        ({"record_every_s": True}, "record_every_s: expected a number, found True"),
        (
            {"all_to_all": "hierarchical", "order": "online"},
            "all_to_all: expected a plan, which says which ranks share a server",
        ),
        ({"adapt": True, "loss": 2}, "`loss`: expected a number from zero to below one, found 2"),
        ({"dry_run": True}, "dry_run: expected adapt, whose setting it is, found none"),
        ({"loss": 0.1}, "loss: expected adapt, whose setting it is, found none"),
        ({"metrics_port": 70000}, "`metrics_port`: expected at most 65535, found 70000"),
    ],
)
def test_a_wrong_setting_is_one_sentence(given, sentence):
    with pytest.raises(BadInput, match=sentence):
        read_settings(given, {})


def test_following_the_traffic_may_come_from_variables():
    environ = {"AURORA_ADAPT": "1", "AURORA_LOSS": "0.05", "AURORA_DRY_RUN": "true"}
    assert read_settings(None, environ) == Settings(adapt=True, loss=0.05, dry_run=True)


def test_names_that_are_nearly_right_are_told():
    environ = {"AURORA_PALN": "p.json", "AUROR_ORDER": "online", "AURORA_DATA": "d", "AURORA_DB_URL": "another's", "PATH": ""}
    said = list(misspelt({"arora": {}}, environ))
    assert said == [
        "the environment variable AURORA_PALN is no setting of the plugin; expected AURORA_PLAN",
        "the environment variable AUROR_ORDER is no setting of the plugin; expected AURORA_ORDER",
        "additional_config: nothing reads 'arora'; expected aurora",
    ]
    assert not list(misspelt({"aurora": {}, "other": 1}, {"AURORA_PLAN": "p.json"}))


def test_files_that_cannot_be_used(tmp_path):
    check_files(Settings(record=tmp_path / "new" / "folder"))
    (tmp_path / "file").write_text("no plan")
    for settings, sentence in (
        (Settings(record=tmp_path / "file" / "in"), "record: expected a folder to write to, found .*file/in: Not a directory$"),
        (Settings(plan=tmp_path / "file", order="plan"), "plan: .*file: not JSON"),
        (Settings(record=Path("/proc/seen")), "record: expected a folder to write to, found /proc/seen: No such file or"),
        (Settings(plan=tmp_path / "none.json", order="plan"), "plan: .*none.json"),
    ):
        with pytest.raises(BadInput, match=sentence):
            check_files(settings)


INSTALL = hooks._install


@pytest.fixture
def engine_args(monkeypatch):
    """vLLM's options, whose configuration is an object; that it was made is noted."""

    class EngineArgs:
        def __init__(self, launcher=None, **additional):
            self.additional_config, self.distributed_executor_backend = additional, launcher
            self.made, self.enable_expert_parallel, self.tensor_parallel_size, self.data_parallel_size = 0, True, 2, 2
            self.parallel = types.SimpleNamespace(
                enable_expert_parallel=True, tensor_parallel_size=2, data_parallel_size=2, worker_cls="another",
            )  # fmt: skip

        def create_engine_config(self, usage_context=None, headless=False):
            self.made += 1
            return types.SimpleNamespace(parallel_config=self.parallel, model_config=None)

    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", types.SimpleNamespace(EngineArgs=EngineArgs))
    platform = types.SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=platform))
    for name in [name for name in os.environ if name.startswith("AURORA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(api_checks, "check_api", lambda *_names: None)
    monkeypatch.setattr(hooks, "_install", lambda *_: None)
    hooks.install_settings_check()
    assert replaced(hooks.ENGINE_CONFIG)
    hooks.install_settings_check()
    yield EngineArgs
    restore(hooks.ENGINE_CONFIG)


def test_wrong_settings_end_a_server_before_anything_is_loaded(engine_args, monkeypatch, caplog):
    wrong = engine_args(aurora={"paln": "p.json"})
    with pytest.raises(SystemExit, match=r"^aurora: additional_config: aurora knows no 'paln'; expected plan$"):
        wrong.create_engine_config(usage_context=types.SimpleNamespace(value="OPENAI_API_SERVER"))
    with pytest.raises(BadInput, match="aurora knows no 'paln'"):
        wrong.create_engine_config("LLM_CLASS")
    assert wrong.made == 0
    assert not caplog.records
    monkeypatch.setenv("AURORA_RECORDS", "seen")
    for settings in ({"aurora": {"order": "online"}}, {}):
        right = engine_args(**settings)
        right.create_engine_config("OPENAI_API_SERVER", headless=True)
        assert right.made == 1
    assert caplog.text.count("AURORA_RECORDS is no setting of the plugin; expected AURORA_RECORD") == 2


def test_null_is_no_settings(engine_args):
    with pytest.raises(BadInput, match='expected "aurora" to be an object, found null'):
        engine_args(aurora=None).create_engine_config()


def test_a_condition_that_is_not_met_ends_a_server_with_a_sentence_before_loading(engine_args):
    asked = engine_args(aurora={"fault_store": "127.0.0.1:1"})
    with pytest.raises(SystemExit, match=r"^aurora: fault_store: expected --enable-fault-tolerance, found none$"):
        asked.create_engine_config("OPENAI_API_SERVER")
    engine_args(aurora={"adapt": True}).create_engine_config("OPENAI_API_SERVER")  # its workers warn
    asked = engine_args(aurora={"adapt": True, "required": True})
    with pytest.raises(SystemExit, match=r"^aurora: adapt: expected --enable-eplb, found none"):
        asked.create_engine_config("OPENAI_API_SERVER")


def test_a_vllm_that_cannot_make_the_worker_is_left_as_it_is_if_the_plugin_is_not_required(engine_args, monkeypatch, caplog):
    def lacking(*names):
        assert names == ("server",)
        raise BadInput("vLLM 9.9 lacks what the plugin needs")

    monkeypatch.setattr(hooks, "_install", INSTALL)
    engine_args(aurora={}).create_engine_config()
    assert "expected vLLM's own worker for GPUs or CPUs, found another; vLLM is left as it is" in caplog.text
    caplog.clear()
    monkeypatch.setattr(api_checks, "check_api", lacking)
    engine_args().create_engine_config()
    assert not caplog.records, "it is not configured"
    engine_args(aurora={}).create_engine_config()
    assert "vLLM 9.9 lacks what the plugin needs; vLLM is left as it is" in caplog.text
    with pytest.raises(SystemExit, match=r"aurora: vLLM 9\.9 lacks what the plugin needs"):
        engine_args(aurora={"required": True}).create_engine_config("OPENAI_API_SERVER")


def test_torchruns_ranks_warn_once(engine_args, monkeypatch, caplog):
    monkeypatch.setenv("AURORA_RECORDS", "seen")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        engine_args("external_launcher", arora={}).create_engine_config()
    assert caplog.text.count("AURORA_RECORDS is no setting") == caplog.text.count("nothing reads 'arora'") == 1


def test_without_vllms_options_nothing_is_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm.engine.arg_utils", raising=False)
    hooks.install_settings_check()
    assert "vllm.engine.arg_utils" not in sys.modules


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics_port": float("inf")}, "metrics_port: expected a whole number, found inf"),
        ({"record_every_s": 10**400}, "record_every_s: expected a number, found 1"),
        ({"record_every_s": 1e300}, r"`record_every_s`: expected at most 1000000\.0, found 1e\+300"),
    ],
)
def test_numbers_beyond_all_bounds_are_refused(given, message):
    with pytest.raises(BadInput, match=message):
        read_settings(given, {})


@pytest.mark.parametrize(
    ("words", "environ", "seen"),
    [
        (["serve", "model"], {}, False),
        (["serve", "model", "--additional-config", "{}"], {}, True),
        (["serve", "model", "--additional_config={}"], {}, True),
        (["serve", "model", "--config", "with.yaml"], {}, True),
        (["serve", "model", "--config=without.yaml"], {}, False),
        (["serve", "model", "--config", "none.yaml"], {}, False),
        (["serve", "model"], {"AURORA_PLAN": "p"}, True),
    ],
)
def test_vllm_is_patched_where_settings_are_in_sight_alone(words, environ, seen, tmp_path, monkeypatch):
    """vLLM calls the plugin before it reads its options, in every process. A script's own call counts as asking."""
    (tmp_path / "with.yaml").write_text("additional-config: {aurora: {}}")
    (tmp_path / "without.yaml").write_text("port: 8000")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vllm", *words])
    for name in [name for name in os.environ if name.startswith("AUR")]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def load_general_plugins():
        return hooks.settings_in_sight()

    class Options:
        def __init__(self, additional):
            self.additional_config = additional
            self.found = load_general_plugins()

    assert load_general_plugins() is Options({}).found is seen
    assert Options({"aurora": {}}).found
    assert hooks.settings_in_sight()
