"""Planning a model of DeepSeek-V3's size: `python bench/size.py` writes bench/results/size-DATE.md."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import machine
from tables import Table, today, write

from aurora.algorithms.replicas.registry import place
from aurora.io import load_plan, load_profile
from aurora.types import GpuSlots

EXPERTS, LAYERS, HIDDEN, INNER, DENSE = 256, 58, 7168, 2048, 3
EXPERT_BYTES = 2 * 3 * HIDDEN * INNER
OTHER_BYTES = 2 * 4 * HIDDEN * HIDDEN * (LAYERS + DENSE)
SERVER = 8  # GPUs
ABOUT = (
    "58 layers of 256 experts in 8 groups; a token chooses 8 experts of 4 groups. Servers of 8 H200, NICs of 50 GB/s; traffic "
    "of `aurora synthetic zipf:0.8`, 1024 tokens on every rank, and the default aim. Seconds, processor time of all cores and "
    "memory are those of the whole command, a process of its own. EPLB alone: its own algorithm on the same loads and slots, "
    "without orders, checks, files and bounds. Gap: to what no placement within the slots can beat."
)


def config(layers: int) -> dict[str, object]:
    return {
        "model_type": "deepseek_v3", "num_hidden_layers": layers + DENSE, "first_k_dense_replace": DENSE, "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER, "n_routed_experts": EXPERTS, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    }  # fmt: skip


def cluster(slots: list[int | None], fabric: bool) -> str:
    """A cluster file: servers of equal GPUs whose memory holds this number of experts a layer; None: 141 GB."""
    port_Bps = 450e9 if fabric else 50e9
    parts = ["schema = 1", 'name = "bench"', *(["[fabric]", 'kind = "servers"', "nic_Bps = 50e9"] if fabric else [])]
    for node, held in enumerate(slots):
        memory_bytes = 141 * 10**9 if held is None else OTHER_BYTES + held * LAYERS * EXPERT_BYTES
        parts += ["[[gpu]]", f'name = "server{node}-"', 'kind = "NVIDIA H200"', f"node = {node}", f"count = {SERVER}"]
        parts += [f"out_Bps = {port_Bps}", f"in_Bps = {port_Bps}", f"memory_bytes = {memory_bytes}"]
    return "\n".join(parts) + "\n"


def timed(*command: object) -> tuple[float, float, float]:
    """Runs `aurora` with these arguments; returns its seconds, those of all cores, and its largest memory in GB."""
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "aurora", *map(str, command)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"aurora {' '.join(map(str, command))} failed")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6


class Rows:
    """A table whose rows are runs of the command."""

    def __init__(self, folder: Path, title: str, about: str = "") -> None:
        self.folder = folder
        self.table = Table(title, COLUMNS, about)

    def add(self, what: str, gpus: int, layers: int, slots: int | list[int], fabric: bool = True) -> None:
        """Plans for `slots` on every GPU, or as the memory of each server holds."""
        names = "shape.json", "profile.npz", "cluster.toml", "plan.json"
        shape, profile, machines, plan = (self.folder / name for name in names)
        shape.write_text(json.dumps(config(layers)))
        machines.write_text(cluster([None] * (gpus // SERVER) if isinstance(slots, int) else slots, fabric))
        options = ["--slots-per-gpu", slots] if isinstance(slots, int) else ["--place", "equal-split"]
        drawn_s, *_ = timed("synthetic", "zipf:0.8", shape, "--sources", gpus, "-o", profile)
        took_s, busy_s, held_GB = timed("plan", "--profile", profile, "--cluster", machines, "-o", plan, *options)
        made, eplb_s = load_plan(plan), "-"
        if isinstance(slots, int):
            load_LE, began = load_profile(profile).load_LE, time.perf_counter()
            place(load_LE, GpuSlots.equal(gpus, slots), "eplb")
            eplb_s = f"{time.perf_counter() - began:.1f}"
        filled = sum(map(len, made.models[0].placement.slots_LG[0]))
        size_MB = plan.stat().st_size / 1e6
        measured = f"{drawn_s:.1f}", f"**{took_s:.1f}**", f"{busy_s:.1f}", f"{held_GB:.2f}", eplb_s
        self.table.add(what, layers, filled, *measured, f"{made.gap:.1%}", f"{size_MB:.1f}")


COLUMNS = (
    "cluster | layers | slots | `aurora synthetic`, s | `aurora plan`, s | all cores, s | GB at most | EPLB alone, s | gap | "
    "plan, MB"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=1024, help="GPUs of the largest cluster")
    most = parser.parse_args().most
    load = f"Load average of the machine when it began: {os.getloadavg()[0]:.1f}."
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = Rows(folder, "The whole model")
        growth = Rows(folder, "Growth with the number of GPUs", "One spare slot on every GPU.")
        for gpus in (16, 72):  # compiled code is in its cache from now on
            for fabric in (False, True):
                Rows(folder, "").add("warm-up", gpus, 1, EXPERTS // gpus + 2, fabric)
        for spare in range(3):
            size.add(f"64 GPUs in 8 servers, {spare} spare slots each", 64, LAYERS, 4 + spare)
        size.add("the same without NICs, 1 spare slot each", 64, LAYERS, 5, fabric=False)
        size.add("144 GPUs in 18 servers, 2 slots each", 144, LAYERS, 2)
        size.add("144 GPUs in 18 servers, four of which hold 3 a GPU", 144, LAYERS, [3] * 4 + [2] * 14)
        for gpus in (each for each in (16, 64, 128, 256, 512, 1024) if each <= most):
            growth.add(f"{gpus} GPUs in {gpus // SERVER} servers", gpus, 4, EXPERTS // gpus + 1 if gpus < EXPERTS else 2)
    command = f"`python bench/size.py --most {most}` on {machine()}."
    head = [f"# Planning at DeepSeek-V3's size, {today()}", "", command, "", ABOUT, "", load]
    write("size", head, size.table.lines, growth.table.lines)


if __name__ == "__main__":
    main()
