"""The report page of 64 GPUs and 58 layers: `python bench/report.py` writes bench/results/report-DATE.md.

Size of the page, seconds to make it, and seconds until each chart is drawn in a headless Chromium (Debian's, by playwright),
from opening the page or from scrolling to the chart; then a change of layer and a step of zoom. Medians over repetitions.
"""

import argparse
import datetime
import statistics
import tempfile
import time
from pathlib import Path

from machine import machine
from playwright.sync_api import Browser, sync_playwright

from aurora.algorithms.workload.synthetic import draw_profile
from aurora.planner.plan import make_plan
from aurora.reports.html import page
from aurora.reports.report import ReportInputs
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Gpu, PlanOptions, SyntheticOptions

SHAPE = {
    "n_routed_experts": 256, "num_hidden_layers": 58, "num_experts_per_tok": 8, "hidden_size": 7168,
    "moe_intermediate_size": 2048, "model_type": "deepseek-v3",
}  # fmt: skip
GPUS = 64
DRAWN = """async (name) => {
  const figure = document.querySelector(`[data-chart=${name}]`);
  figure.scrollIntoView({behavior: "instant"});
  while (!figure.dataset.drawn) await new Promise(requestAnimationFrame);
}"""
LAYER = """async () => {
  const figure = document.querySelector("[data-chart=gantt]"), words = figure.querySelector(".words");
  const before = words.textContent;
  figure.querySelector("[aria-label='next layer']").click();
  while (words.textContent === before) await new Promise(requestAnimationFrame);
}"""
ZOOM = """() => document.querySelector("[data-chart=timeline-chart] [aria-label='zoom in']").click()"""


def evidence() -> ReportInputs:
    """A plan of the large shape with its predicted trace."""
    cluster = Cluster("64 equal GPUs", tuple(Gpu(f"g{i}", "reference", i // 8, 50e9, 50e9, 80 * 10**9) for i in range(GPUS)))
    profile = draw_profile("zipf:0.8", SHAPE, SyntheticOptions(sources=GPUS, window_tokens=256))
    plan = make_plan(cluster, [profile], PlanOptions(place="balanced", assign="contiguous"))
    return ReportInputs(plan, (("predicted", simulate_plan(plan, [profile])),), (profile,))


def drawing(browser: Browser, file: Path) -> dict[str, float]:
    """Seconds by what was waited for."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    began = time.perf_counter()
    tab.goto(file.as_uri())
    took = {"page loaded": time.perf_counter() - began}
    names = tab.locator("[data-chart]").evaluate_all("all => all.map(figure => figure.dataset.chart)")
    steps = [(f"{name} drawn", DRAWN, name) for name in names]
    for what, script, name in [*steps, ("next layer of all charts", LAYER, None), ("zoom of the timeline", ZOOM, None)]:
        began = time.perf_counter()
        tab.evaluate(script, name)
        took[what] = time.perf_counter() - began
    tab.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    given = evidence()
    began = time.perf_counter()
    text = page(given)
    made_s = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "report.html"
        file.write_text(text, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        version = browser.version
        runs = [drawing(browser, file) for _ in range(repeats)]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"# The report page of 64 GPUs and 58 layers, {today}",
        "",
        f"`python bench/report.py --repeats {repeats}` on {machine()}, headless Chromium {version}. 256 experts, top-8, one",
        f"predicted trace of {len(given.traces[0][1])} events. The page is {len(text.encode()) / 1e6:.2f} MB and was made in "
        f"{made_s:.1f} s. Medians (largest).",
        "",
        "| | seconds |",
        "|---|---|",
    ]
    for what in runs[0]:
        taken = [run[what] for run in runs]
        lines.append(f"| {what} | {statistics.median(taken):.3f} ({max(taken):.3f}) |")
    totals = [sum(run.values()) for run in runs]
    lines.append(f"| all of it | {statistics.median(totals):.3f} ({max(totals):.3f}) |")
    out = Path(__file__).parent / "results" / f"report-{today}.md"
    out.write_text("\n".join(lines) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main()
