"""The commands and Python of README and docs run as they stand there, page by page, each page in a folder of its own.

Their processes are forked from one that has imported torch and its like; those of the wheel's test start from nothing, as users' do.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import aurora.types
from aurora.advisor.engines import SERVING_ENGINES
from aurora.algorithms.gradient_codes import SCHEMES
from aurora.errors import BadInput
from aurora.io import load_cluster, load_trace
from aurora.planner.options import strategies
from aurora.types.run_options import TRANSPORTS

ROOT = Path(__file__).parents[1]
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
PAGES = {
    str(file.relative_to(ROOT)): re.findall(r"^```(\w+)\n(.*?)^```", file.read_text(), re.MULTILINE | re.DOTALL)
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
EXPECTED = {  # what the last block of a page prints, or a part of it
    "docs/how-to/python.md": "tensor([0., 1., 2., 3.])\n",
    "README.md": "exclusive, equal GPUs gap ",
}
RUN = [page for page, blocks in PAGES.items() if {"bash", "python"} & {kind for kind, _ in blocks}]
REPORTED = [page for page in RUN if any(".html" in text for kind, text in PAGES[page] if kind in ("bash", "python"))]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=[*([] if page == "README.md" else [pytest.mark.full]), *([pytest.mark.browser] * (page in REPORTED))]
        )
        for page in RUN
    ],
)
def test_every_example_runs(page, tmp_path, warm):
    """A page's commands run; reports that they write have no empty section."""
    run_page(page, tmp_path, warm)
    if page in REPORTED:
        check_reports(tmp_path)


@pytest.mark.full
@pytest.mark.browser
@pytest.mark.timeout(1800)
def test_the_demo(tmp_path, warm):
    """Each command is printed, each way is verified and measured three times; the report has no empty section."""
    folder = tmp_path / "demo"
    done = subprocess.run([warm / "aurora", "demo", "-o", folder], check=True, capture_output=True, text=True, timeout=900)
    assert done.stdout.count("$ aurora run ") == 9
    assert done.stdout.count(" --verify ") == 3
    assert re.search(r"sharing the GPUs (is|loses)", done.stdout, re.IGNORECASE)
    traces = [load_trace(folder / f"plan-{how}-{repeat}.npz") for how in ("in-turn", "together") for repeat in range(3)]
    assert len({trace.step_X.max() for trace in traces}) == 1
    check_reports(tmp_path)


def check_reports(folder):
    """Opens each report of a folder in a browser: every section shows charts or tables, every tile a number."""
    reports = [path for path in sorted(folder.rglob("*.html")) if not path.is_symlink()]
    assert reports
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium; the reports were written, not opened")
    for report in reports:
        assert empty_parts(report) == []


def empty_parts(report):
    """What a report's page lacks, in words, and what the browser complains of."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    lacks = []
    with sync_api.sync_playwright() as playwright:
        tab = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=120_000).new_page()
        tab.set_default_timeout(120_000)
        tab.on("console", lambda message: lacks.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: lacks.append(str(error)))
        tab.goto(report.as_uri())
        for chart in tab.locator("[data-chart]").all():
            chart.scroll_into_view_if_needed()
            tab.wait_for_selector(f"[data-chart={chart.get_attribute('data-chart')}][data-drawn]")
            if not chart.locator("figcaption p").inner_text():
                lacks.append(f"chart {chart.get_attribute('data-chart')} says nothing")
        lacks += [f"{each.inner_text()}" for each in tab.locator("section .missing").all()]
        lacks += [
            f"tile {each.inner_text()}"
            for each in tab.locator(".tiles > div").all()
            if "–" in each.locator(".value").inner_text()
        ]
        sections = tab.locator("section").all()
        lacks += [
            f"section {each.get_attribute('id')}" for each in sections if not each.locator("canvas, tbody tr, li").count()
        ]
        assert len(sections) > 1
    return lacks


def run_page(page, tmp_path, warm):
    """Runs the commands and Python of a page in a folder, as they stand there."""
    for name in ("profiles", "aurora", "bench", "LICENSE", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(warm), str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = []
    for language, text in PAGES[page]:
        if language not in ("bash", "python") or "pip install" in text:
            continue
        command = ["bash", "-euc", text] if language == "bash" else [warm / "python", "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert ("--verify" in text) == ("verified: same greedy tokens" in done.stdout)
        printed.append(done.stdout)
    assert EXPECTED.get(page, "") in printed[-1]


def test_no_two_pages_write_a_file_of_one_name():
    pages_of = {}
    for page, blocks in PAGES.items():
        commands = " ".join(text for language, text in blocks if language == "bash")
        for name in set(re.findall(r"(?:-o|(?<!2)>)\s+([\w./-]+\.\w+)", commands)):
            pages_of.setdefault(name, []).append(page)
    assert {name: pages for name, pages in pages_of.items() if len(pages) > 1} == {}


@pytest.fixture(scope="module")
def generate():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_schema_of_options_is_what_the_dataclasses_check(generate):
    schema = json.loads(json.dumps(generate.options_schema()))["$defs"]
    assert len(schema) == 7
    for name, found in schema.items():
        kind = getattr(aurora.types, name)
        assert list(found["properties"]) == [field.name for field in fields(kind)]
        for field, about in found["properties"].items():
            outside = [2 * about["maximum"]] if "maximum" in about else []
            outside += [about["minimum"] - 1] if "minimum" in about else [about.get("exclusiveMinimum")]
            for value in (each for each in outside if each is not None):
                with pytest.raises(BadInput, match=f"`{field}`: expected"):
                    kind(**{field: value})
        assert kind(**{name: each["default"] for name, each in found["properties"].items()}) == kind()


def test_the_reference_has_every_option_with_its_help(generate):
    plan = generate.command_line().split("## aurora plan\n")[1].split("\n## ")[0]
    assert "Decide which GPU holds which experts" in plan
    assert re.search(r"`--order CHOICE`: order of each all-to-all\. \*\[choices: auto, openshop,", plan)


def test_every_setting_of_an_engine_has_a_default_an_effect_and_a_source(generate):
    for engine in SERVING_ENGINES.values():
        rows = generate.settings(engine)
        assert len(rows) > 4
        assert all(len(row) == 4 and all(row) for row in rows), rows
    assert generate.engines().count("\n## ") == len(SERVING_ENGINES)


def test_pages_that_are_made_from_the_code_are_up_to_date(generate):
    assert generate.VLLM_SETTINGS.read_text() == generate.vllm_settings(), "make docs"
    assert generate.FILES_PAGE.read_text() == generate.files_page(), "make docs"


def test_the_schema_of_files_takes_those_that_are_written(generate, tmp_path):
    import jsonschema

    schema = json.loads(json.dumps(generate.files_schema()))
    profile = aurora.synthetic_profile("zipf:1", "mixtral-topics", aurora.SyntheticOptions(sources=4))
    aurora.save(aurora.plan(aurora.load("demo-4"), profile), tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    check = jsonschema.Draft202012Validator({**schema, "$ref": "#/$defs/PlanTable"})
    assert list(check.iter_errors(plan)) == []
    plan["models"][0]["top_k"] = "2"
    assert [list(error.absolute_path) for error in check.iter_errors(plan)] == [["models", 0, "top_k"]]


def test_the_plugins_pages_are_short():
    """One screen to start, one page of settings, one of limits, whose tables are made from code."""
    pages = [ROOT / "integrations/README.md", *(ROOT / "docs/reference").glob("vllm-*.md")]
    assert len(pages) == 3
    assert sum(not line.startswith("|") for page in pages for line in page.read_text().splitlines()) <= 190


def test_the_cluster_example_is_a_cluster(tmp_path):
    text, *_ = (text for language, text in PAGES["docs/how-to/cluster.md"] if language == "toml")
    (tmp_path / "c.toml").write_text(text)
    cluster = load_cluster(tmp_path / "c.toml")
    assert (cluster.name, len(cluster)) == ("two-kinds", 8)


@pytest.mark.parametrize("kind", [*strategies(), "scheme"])
def test_every_name_that_is_registered_is_in_the_docs(kind):
    text = (ROOT / "docs" / "reference" / "strategies.md").read_text()
    assert [name for name in TRANSPORTS if f"`{name}`" not in (ROOT / "docs" / "how-to" / "run.md").read_text()] == []
    assert [name for name in (strategies() | {"scheme": SCHEMES})[kind] if f"`{name}`" not in text and name != "auto"] == []


def test_the_glossary_has_every_axis_letter_that_is_in_use():
    text = (ROOT / "docs" / "glossary.md").read_text()
    files = [*(ROOT / "aurora").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    used = {letter for file in files for axes in re.findall(r"\b[a-z_]+_([A-Z]{1,4})\b", file.read_text()) for letter in axes}
    assert sorted(used - set(re.findall(r"^\| ([A-Z]) \|", text, re.MULTILINE))) == []


def test_paths_on_the_page_of_the_architecture_exist():
    """`aurora/cli` and `planner/plan.py`, which is in aurora, as `planner/plan` is."""
    found = re.findall(r"`(\w+/[\w./]+)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(found) > 30
    suffixes = ("", ".py")
    homes = [ROOT, ROOT / "aurora"]
    assert [path for path in found if not any((home / f"{path}{end}").exists() for home in homes for end in suffixes)] == []


def test_what_contributing_points_to_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text().split("Ten things")[1].split("##")[0]
    homes = re.findall(r"\| `([\w./]+)` \|$", text, re.MULTILINE)
    assert len(homes) == 10
    assert [home for home in homes if not (ROOT / home).exists()] == []
