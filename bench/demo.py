"""The demo's table over several repetitions: `python bench/demo.py [--repeats N]` writes bench/results/demo-DATE.md.

Every repetition serves the three ways one after the other, so that slow moments of the machine meet all of them; figures are
medians, with the smallest and largest speed-up beside.
"""

import argparse
import datetime
import statistics
import tempfile
from pathlib import Path

from machine import machine

from aurora.cli.demo import WAYS, DemoOutcome, serve_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    runs: list[list[DemoOutcome]] = []
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(serve_all(Path(folder), 120.0, lambda *_: None))
        print(f"{repeat + 1}/{repeats}: {[round(outcome.measured_s, 2) for outcome in runs[-1]]} s", flush=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"# The demo's table, {today}",
        "",
        f"`python bench/demo.py --repeats {repeats}` on {machine()}. Four ranks as processes, ports of 3 MB/s each way (shaped",
        "transport), 32 prompts of 128 tokens and 4 new tokens for each of two models. Medians; speed-up over the first way",
        "within a repetition, median (smallest-largest).",
        "",
        "| way | predicted s | measured s | prediction off | speed-up | answers that differ |",
        "|---|---|---|---|---|---|",
    ]
    for index, way in enumerate(WAYS):
        mine = [run[index] for run in runs]
        speed_ups = [run[0].measured_s / run[index].measured_s for run in runs]
        cells = (
            way.name,
            f"{statistics.median(o.predicted_s for o in mine):.2f}",
            f"{statistics.median(o.measured_s for o in mine):.2f}",
            f"{statistics.median(o.predicted_s / o.measured_s - 1 for o in mine):+.1%}",
            f"{statistics.median(speed_ups):.2f} ({min(speed_ups):.2f}-{max(speed_ups):.2f})",
            str(sum(o.differences for o in mine)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    out = Path(__file__).parent / "results" / f"demo-{today}.md"
    out.write_text("\n".join(lines) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main()
