"""The examples for containers: what they mount exists, and the settings that they give are settings of the plugin."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from aurora_vllm.metrics import Metrics
from aurora_vllm.plugin_status import ControlMetrics
from aurora_vllm.rank_progress import RankFiles, RankProgress
from aurora_vllm.ranks_metrics import MetricsPage
from aurora_vllm.serving_changes import ServingChanges
from aurora_vllm.settings import Settings
from aurora_vllm.watchdog import Watchdog
from prometheus_client import CollectorRegistry

from aurora.cli.main import app
from tests.integrations.test_client_paths import served

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "integrations" / "examples"


def load(name):
    return yaml.safe_load((EXAMPLES / name).read_text())


def test_the_compose_file_serves_by_settings_and_mounts_what_there_is():
    services = load("compose.yaml")["services"]
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


def test_the_compose_file_serves_by_the_command_and_probes_it(tmp_path, monkeypatch):
    """With stand-ins for vLLM; `test_vllm_command` runs its options with vLLM."""
    services = load("compose.yaml")["services"]
    assert {each["restart"] for each in services.values()} == {"always"}, "a container whose command ended is started again"
    service = services["vllm"]
    run, bound, _ = app.parse_args([*service["entrypoint"][1:], *service["command"]], exit_on_error=False, print_error=False)
    assert (run.__name__, bound.kwargs["survive"], bound.kwargs["state"]) == ("vllm", True, Path("/aurora"))
    kind, _, *probe = service["healthcheck"]["test"]

    async def ask(_session, url):
        words = [word.replace("http://127.0.0.1:8000", url) for word in probe]
        return await (await asyncio.create_subprocess_exec(sys.executable, *words)).wait()

    assert (kind, served(tmp_path, monkeypatch, None, ask)[0]) == ("CMD", 0)
    assert subprocess.run([sys.executable, *probe], capture_output=True).returncode == 1, "nothing listens any more"


def test_alerts_ask_for_metrics_that_exist():
    registry = CollectorRegistry()
    Metrics("m", 0, {0: 0}, None, Settings(), registry)
    ControlMetrics("m", 0, registry)
    Watchdog(0, RankProgress(), RankFiles(EXAMPLES, []), True, "m", registry=registry).end()
    families = [*registry.collect(), *MetricsPage({}, ServingChanges(1.0)).collect()]
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families} | {"aurora_engaged"}
    rules = load("alerts.yaml")["groups"][0]["rules"]
    assert {name for rule in rules for name in re.findall(r"aurora_\w+", rule["expr"])} <= names
    assert load("prometheus.yaml")["rule_files"] == ["alerts.yaml"]


@pytest.mark.parametrize("path", [path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.yaml")], ids=str)
def test_every_example_is_yaml(path):
    assert isinstance(load(path), dict)
