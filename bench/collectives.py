"""Predicted all-to-alls against recorded ones: `python bench/collectives.py` writes bench/results/collectives-DATE.md.

Recorded seconds are read from AURORA_DATA (default ../shared/data): NCCL's collectives on 2, 4 and 8 GPUs of one node, and
DeepEP's dispatch and combine on 8 H100. Nothing is written where that folder is absent.
"""

import csv
import datetime
import os
from collections.abc import Iterable
from math import comb
from pathlib import Path

import numpy as np
from machine import machine
from scipy.optimize import linprog

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.measured_links import LinkFit
from aurora.algorithms.network.switch import timed
from aurora.types import Network

ROOT = Path(__file__).parents[1]
RECORDED = Path(os.environ.get("AURORA_DATA", ROOT.parent / "shared" / "data")) / "gpu_moe_aiconfigurator"
KINDS = {"a100_sxm": "A100 SXM", "h100_sxm": "H100 SXM", "l40s": "L40S"}
WIDTH = {"half": 2, "int8": 1}
RANGES = {"all": 0, "1 MiB and more": 1 << 20}  # what a port sends at least; below, a message is mostly start-up and protocol
SMS = 20  # DeepEP's default number of SMs for its normal kernels
Series = tuple[np.ndarray, np.ndarray]  # bytes, seconds


def recorded_rows(name: str) -> list[dict[str, str]]:
    """The file's rows; none where it is absent."""
    path = RECORDED / name
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def series(rows: list[dict[str, str]], op: str, dtype: str, gpus: int) -> Series:
    """A rank's whole buffer in bytes, as nccl-tests counts it, and the seconds, by size."""
    found = [row for row in rows if (row["op_name"], row["nccl_dtype"], row["num_gpus"]) == (op, dtype, str(gpus))]
    points = sorted((int(row["message_size_elems"]) * WIDTH[dtype], float(row["latency_ms"]) / 1e3) for row in found)
    return np.array([size for size, _ in points]), np.array([seconds for _, seconds in points])


def sent(buffer_X: np.ndarray, gpus: int) -> np.ndarray:
    """What a port sends of an all-to-all's buffer: all but the part that stays."""
    return buffer_X // gpus * (gpus - 1)


def fitted_link(sent_X: np.ndarray, seconds_X: np.ndarray) -> LinkFit:
    """The start-up and rate of least mean |predicted / measured - 1|: a linear program, so no line has less.

    What a line can do at all with these recordings. The product's own `fit_link` takes the slope between the two largest sizes,
    so that what a probe's every message pays cancels out; recordings have sizes so near each other that the slope is noise.
    """
    per_X2 = np.stack([1 / seconds_X, sent_X / seconds_X], axis=1)
    unit_2 = per_X2.max(axis=0)
    scaled_X2, count = per_X2 / unit_2, len(seconds_X)  # so that both unknowns are about one
    found = linprog(
        np.concatenate([np.zeros(2), np.full(count, 1 / count)]),
        A_ub=np.block([[scaled_X2, -np.eye(count)], [-scaled_X2, -np.eye(count)]]),
        b_ub=np.concatenate([np.ones(count), -np.ones(count)]),
    )
    line_2 = found.x[:2]
    error = float(np.median(abs(scaled_X2 @ line_2 - 1)))
    return LinkFit(float(line_2[0] / unit_2[0]), float(unit_2[1] / line_2[1]), error)


def simulated(link: LinkFit, gpus: int, sent_X: np.ndarray, method: str) -> np.ndarray:
    """(X,) seconds of uniform all-to-alls by the switch, on equal GPUs whose ports are `link`."""
    network = Network.equal(gpus, link.rate_Bps, link.startup_s)
    took = []
    for total in sent_X.tolist():
        bytes_GG = np.full((gpus, gpus), total // (gpus - 1), dtype=np.int64)
        np.fill_diagonal(bytes_GG, 0)
        order = ORDER[method](bytes_GG, network, rng=np.random.default_rng(0))
        took.append(timed(order, bytes_GG, network).makespan_s)
    return np.array(took)


def errors(predicted_X: np.ndarray, recorded_X: np.ndarray) -> np.ndarray:
    return np.asarray(abs(predicted_X / recorded_X - 1))


def shown(error_X: np.ndarray) -> str:
    return f"{np.median(error_X):.1%} / {error_X.max():.1%}"


def described(link: LinkFit) -> str:
    return f"{link.startup_s * 1e6:.1f} | {link.rate_Bps / 1e9:.1f}"


def all_to_alls() -> Iterable[tuple[str, int, str, np.ndarray, np.ndarray]]:
    """Kind, GPUs, dtype, sent bytes and seconds of every recorded all-to-all."""
    for stem in KINDS:
        rows = recorded_rows(f"collectives_{stem}.csv")
        for gpus in (2, 4, 8):
            for dtype in WIDTH:
                buffer_X, seconds_X = series(rows, "alltoall", dtype, gpus)
                if len(buffer_X):
                    yield stem, gpus, dtype, sent(buffer_X, gpus), seconds_X


def fitted() -> list[str]:
    lines = [
        "## NCCL all-to-all: fitted to every other size, priced by the switch",
        "",
        "The start-up and rate fitted to the sizes of even index are given to all ports. `held back`: the sizes of odd index, "
        "priced all-at-once; the last two columns price all sizes of the range. Ranges count what a port sends.",
        "",
        "| kind | GPUs | dtype | sizes | start-up us | rate GB/s | held back | all-at-once | openshop |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    pooled: dict[tuple[str, str], list[np.ndarray]] = {}
    for stem, gpus, dtype, every_X, took_X in all_to_alls():
        for sizes, least in RANGES.items():
            sent_X, seconds_X = every_X[every_X >= least], took_X[every_X >= least]
            link = fitted_link(sent_X[::2], seconds_X[::2])
            at_once, shop = (errors(simulated(link, gpus, sent_X, method), seconds_X) for method in ("all-at-once", "openshop"))
            pooled.setdefault((stem, sizes), []).append(np.stack([at_once, shop, np.arange(len(at_once)) % 2]))
            cells = f"{shown(at_once[1::2])} | {shown(at_once)} | {shown(shop)}"
            lines.append(f"| {KINDS[stem]} | {gpus} | {dtype} | {sizes} | {described(link)} | {cells} |")
            print(lines[-1], flush=True)
    for (stem, sizes), parts in pooled.items():
        at_once, shop, held = np.concatenate(parts, axis=1)
        cells = f"{shown(at_once[held == 1])} | {shown(at_once)} | {shown(shop)}"
        lines.append(f"| **{KINDS[stem]}** | all | both | {sizes} | - | - | {cells} |")
        print(lines[-1], flush=True)
    return lines


def from_pairs() -> list[str]:
    lines = [
        "## NCCL all-to-all: fitted to two GPUs, predicted on four and eight",
        "",
        "Two GPUs exchange one message each way, so their link is a port's; nothing of four and eight GPUs is fitted.",
        "",
        "| kind | GPUs | dtype | sizes | start-up us | rate GB/s | all-at-once | openshop |",
        "|---|---|---|---|---|---|---|---|",
    ]
    links = {}
    for stem, gpus, dtype, every_X, took_X in all_to_alls():
        for sizes, least in RANGES.items():
            sent_X, seconds_X = every_X[every_X >= least], took_X[every_X >= least]
            if gpus == 2:
                links[stem, dtype, sizes] = fitted_link(sent_X, seconds_X)
            elif (link := links.get((stem, dtype, sizes))) is not None:
                priced = (simulated(link, gpus, sent_X, method) for method in ("all-at-once", "openshop"))
                cells = " | ".join(shown(errors(predicted_X, seconds_X)) for predicted_X in priced)
                lines.append(f"| {KINDS[stem]} | {gpus} | {dtype} | {sizes} | {described(link)} | {cells} |")
                print(lines[-1], flush=True)
    return lines


def by_collective() -> list[str]:
    """What other collectives say about the same ports."""
    columns = {
        "alltoall": ("alltoall", "half", 1),
        "all_gather": ("all_gather", "half", 1),
        "reduce_scatter": ("reduce_scatter", "half", 1),
        "all_reduce, half": ("all_reduce", "half", 2),
        "all_reduce, int8": ("all_reduce", "int8", 2),
    }
    lines = [
        "## Rate of a port by collective, at the largest size (512 MiB), GB/s",
        "",
        "`(n - 1) / n` of the buffer, twice that for all_reduce (what crosses a port of a ring), over the recorded seconds; "
        "the datasheet's rate in one direction beside it.",
        "",
        f"| kind | GPUs | {' | '.join(columns)} | datasheet |",
        "|---|---|" + "---|" * (len(columns) + 1),
    ]
    datasheet = {row["gpu"]: float(row["intra_node_bw"]) for row in recorded_rows("gpu_specs.csv")}
    for stem in KINDS:
        rows = recorded_rows(f"collectives_{stem}.csv")
        for gpus in (2, 4, 8) if rows else ():
            rates = []
            for op, dtype, times in columns.values():
                buffer_X, seconds_X = series(rows, op, dtype, gpus)
                rates.append(f"{times * sent(buffer_X, gpus)[-1] / seconds_X[-1] / 1e9:.1f}")
            lines.append(f"| {KINDS[stem]} | {gpus} | {' | '.join(rates)} | {datasheet[stem] / 1e9:.0f} |")
            print(lines[-1], flush=True)
    return lines


def hit(experts: int, top_k: int, gpus: int) -> float:
    """Share of tokens that need a given GPU when their top_k of `experts` are drawn uniformly."""
    return 1 - comb(experts - experts // gpus, top_k) / comb(experts, top_k)


def deepep(gpus: int = 8) -> dict[str, Series]:
    """Bytes that a port sends, and seconds, of each of DeepEP's phases inside one node of H100.

    Dispatch carries FP8 with one float32 scale in 128 values, combine bfloat16. `normal` sends a token once to a GPU that holds
    several of its experts (in expectation over uniform choices), `ll` once an expert (bandwidth x time); 1 / gpus stays.
    """
    found: dict[str, list[tuple[int, float]]] = {}

    def add(phase: str, pair_bytes: float, us: str) -> None:
        found.setdefault(phase, []).append((max(1, round(pair_bytes)) * (gpus - 1), float(us) / 1e6))

    for row in recorded_rows("deepep_normal_h100_sxm.csv"):
        if row["node_num"] == "1" and int(row["dispatch_sms"]) == int(row["combine_sms"]) == SMS:
            hidden = int(row["hidden_size"])
            tokens = int(row["num_token"]) * hit(int(row["num_experts"]), int(row["num_topk"]), gpus)
            add("normal dispatch", tokens * (hidden + hidden // 128 * 4), row["dispatch_transmit_us"])
            add("normal combine", tokens * hidden * 2, row["combine_transmit_us"])
    for row in recorded_rows("deepep_ll_h100_sxm.csv"):
        if row["node_num"] == "1":
            for phase in ("dispatch", "combine"):
                us = row[f"{phase}_avg_t_us"]
                add(f"ll {phase}", float(row[f"{phase}_bandwidth_gbps"]) * 1e3 * float(us) / gpus, us)
    columns = {phase: np.array(sorted(points)) for phase, points in found.items()}
    return {phase: (column[:, 0].astype(np.int64), column[:, 1]) for phase, column in columns.items()}


def dispatches() -> list[str]:
    phases = deepep()
    nccl_X, nccl_s = series(recorded_rows("collectives_h100_sxm.csv"), "alltoall", "int8", 8)
    if not phases or not len(nccl_X):
        return ["DeepEP: the recording is absent."]
    nccl_X = sent(nccl_X, 8)
    lines = [
        f"## DeepEP on 8 H100 SXM, one node, {SMS} SMs for the normal kernels",
        "",
        "Uniform all-to-alls of the bytes that each phase sends, all-at-once. `from NCCL`: start-up and rate fitted to NCCL's "
        "all-to-all (int8) on 8 H100; `held back`: fitted to every other recording of the phase, errors at the others.",
        "",
        "| phase | sizes | recordings | NCCL start-up us | rate GB/s | from NCCL | own start-up us | rate GB/s | held back |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for phase, (every_X, took_X) in phases.items():
        for sizes, least in RANGES.items():
            sent_X, seconds_X = every_X[every_X >= least], took_X[every_X >= least]
            link = fitted_link(nccl_X[nccl_X >= least], nccl_s[nccl_X >= least])
            own = fitted_link(sent_X[::2], seconds_X[::2])
            foreign = shown(errors(simulated(link, 8, sent_X, "all-at-once"), seconds_X))
            held = shown(errors(simulated(own, 8, sent_X[1::2], "all-at-once"), seconds_X[1::2]))
            lines.append(f"| {phase} | {sizes} | {len(sent_X)} | {described(link)} | {foreign} | {described(own)} | {held} |")
            print(lines[-1], flush=True)
    return lines


def heading(today: str) -> list[str]:
    versions = {KINDS[stem]: {row["lib"] for row in recorded_rows(f"collectives_{stem}.csv")} for stem in KINDS}
    libraries = ", ".join(f"{kind} with {' and '.join(sorted(libs))}" for kind, libs in versions.items() if libs)
    return [
        f"# Predicted against recorded collectives, {today}",
        "",
        f"`python bench/collectives.py`, computed on {machine()}. Recorded elsewhere by nccl-tests ({libraries}) "
        "and DeepEP's own tests; from ai-dynamo/aiconfigurator @ 095f58a, Apache-2.0. Errors are |predicted / recorded - 1|, "
        "median / worst. All recorded all-to-alls are uniform: they test ports and start-ups, not orders of skewed traffic.",
    ]


def uncaptured() -> list[str]:
    return [
        "## What the switch does not capture",
        "",
        "- Steps of protocol: between small and large sizes the recorded seconds stand on a plateau where several sizes cost "
        "the same. On NVLink one line over all sizes is up to about half too low there, and the start-up fitted from 1 MiB on "
        "is 1.3 to 2.2 times that of all sizes.",
        "- Posting together: NCCL's all-to-all launches all sends and receives at once, and on NVLink its fitted start-up "
        "hardly grows with the GPUs. `openshop` prices one start-up after another for n - 1 messages, as if each were "
        "launched alone, which nothing here recorded.",
        "- Ports that one peer does not fill: an NVLink port's rate rises from two GPUs to eight, so pairs overprice larger "
        "groups.",
        "- Shared paths: on L40S (PCIe) a port's rate falls to about a fifth on four GPUs and a tenth on eight, for rings as "
        "for all-to-alls; a switch that never blocks does not describe such a node, and the seconds of eight do not follow "
        "one line either.",
        "- Reduction in the switch: on eight H100 all_reduce of halves is faster than of int8, which NVLink SHARP does not "
        "add; all-to-alls have no part in it.",
        "- Kernels: DeepEP's normal kernels have about three times NCCL's start-up, and its phases are slower than their own "
        "fitted line for short tokens (normal dispatch, hidden size 2048), for top-k 1 or 2, and where a low-latency dispatch "
        "has one or two experts a GPU.",
    ]


def main() -> None:
    if not any((RECORDED / f"collectives_{stem}.csv").exists() for stem in KINDS):
        print(f"no recorded collectives under {RECORDED}: nothing written")
        return
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = [heading(today)]
    for part in (fitted, from_pairs, by_collective, dispatches, uncaptured):
        parts.append(part())
    out = Path(__file__).parent / "results" / f"collectives-{today}.md"
    out.write_text("\n\n".join("\n".join(lines) for lines in parts) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
