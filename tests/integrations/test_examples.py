"""The examples for containers: what they mount exists, and the settings that they give are settings of the plugin."""

import json
import re
from pathlib import Path

import pytest
import yaml
from aurora_vllm.metrics import Metrics
from aurora_vllm.plugin_status import ControlMetrics
from aurora_vllm.rank_progress import RankFiles, RankProgress
from aurora_vllm.settings import Settings, read_settings
from aurora_vllm.watchdog import Watchdog
from prometheus_client import CollectorRegistry

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "integrations" / "examples"
SERVED = {"plan": Path("/aurora/plan.json"), "record": Path("/aurora/seen"), "order": "stock", "required": True}


def load(name):
    return yaml.safe_load((EXAMPLES / name).read_text())


def settings_of(command):
    (given,) = (each.partition("=")[2] for each in command if each.startswith("--additional-config="))
    return read_settings(json.loads(given)["aurora"], {})


def test_the_compose_file_serves_by_settings_and_mounts_what_there_is():
    services = load("compose.yaml")["services"]
    assert settings_of(services["vllm"]["command"]) == Settings(**SERVED)
    mounts = [mount.split(":")[0] for each in services.values() for mount in each.get("volumes", ())]
    ours = [mount for mount in mounts if mount.startswith(".")]
    assert len(ours) == 4
    assert all((EXAMPLES / mount).exists() for mount in ours)
    ports = [port for each in services.values() for port in each.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert load("prometheus.yaml")["scrape_configs"][0]["static_configs"] == [{"targets": ["vllm:8000"]}]
    (provider,) = load("provisioning/dashboards/aurora.yaml")["providers"]
    assert any(mount.startswith(f"../grafana.json:{provider['options']['path']}/") for mount in services["grafana"]["volumes"])
    (source,) = load("provisioning/datasources/prometheus.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")


def test_a_server_is_started_again_whatever_its_exit_code():
    """When a rank is lost, vLLM ends with 0."""
    assert {each["restart"] for each in load("compose.yaml")["services"].values()} == {"always"}


def test_alerts_ask_for_metrics_that_exist():
    registry = CollectorRegistry()
    Metrics("m", 0, {0: 0}, None, Settings(), registry)
    ControlMetrics("m", 0, registry)
    Watchdog(0, RankProgress(), RankFiles(EXAMPLES, []), True, "m", registry=registry).end()
    families = list(registry.collect())
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families} | {"aurora_engaged"}
    rules = load("alerts.yaml")["groups"][0]["rules"]
    assert {name for rule in rules for name in re.findall(r"aurora_\w+", rule["expr"])} <= names
    assert load("prometheus.yaml")["rule_files"] == ["alerts.yaml"]


@pytest.mark.parametrize("path", [path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.yaml")], ids=str)
def test_every_example_is_yaml(path):
    assert isinstance(load(path), dict)
