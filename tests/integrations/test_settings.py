"""What users ask the vLLM plugin for, and what they hear when it cannot be."""

from pathlib import Path

import pytest
from aurora_vllm.settings import Settings, read_settings

from aurora.errors import BadInput


def test_nothing_asked_is_nothing():
    assert read_settings(None, {"AURORA_DATA": "elsewhere", "PATH": "/bin"}) is None


def test_an_empty_object_asks_for_vllms_own_ways():
    assert read_settings({}, {}) == Settings(order="stock")


def test_a_plan_brings_its_order():
    assert read_settings({"plan": "p.json"}, {}) == Settings(plan=Path("p.json"), order="plan")
    assert read_settings({"plan": "p.json", "order": "stock"}, {}).order == "stock"


def test_variables_fill_what_the_configuration_leaves_out():
    environ = {"AURORA_ORDER": "online", "AURORA_RECORD": "seen", "AURORA_RECORD_EVERY_S": "2.5", "AURORA_METRICS_PORT": "9100"}
    assert read_settings(None, environ) == Settings(order="online", record=Path("seen"), record_every_s=2.5, metrics_port=9100)
    assert read_settings({"order": "stock"}, environ).order == "stock"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"paln": "p.json"}, r"additional_config: aurora knows no 'paln'; expected plan, order"),
        ([1], r'expected "aurora" to be an object, found \[1\]'),
        ({"order": "random"}, "order: expected one of plan, online, stock, found 'random'"),
        ({"order": "plan"}, 'order: expected a plan for "plan", found none'),
        ({"plan": 3}, "plan: expected a path, found 3"),
        ({"record_every_s": "soon"}, "record_every_s: expected a number, found 'soon'"),
        ({"record_every_s": 0}, "record_every_s: expected seconds above zero, found 0"),
        ({"record_every_s": True}, "record_every_s: expected a number, found True"),
        ({"colocate": "both"}, "colocate: expected an order or a plan, found vLLM's own all-to-all"),
        ({"colocate": "a/b", "order": "online"}, "colocate: expected a name of letters, digits, _ and -, found 'a/b'"),
        ({"metrics_port": 70000}, "metrics_port: expected a port from 1 to 65535, found 70000"),
    ],
)
def test_a_wrong_setting_is_one_sentence(given, sentence):
    with pytest.raises(BadInput, match=sentence):
        read_settings(given, {})
