"""Lines of our own modules that are loaded: by `import aurora`, by `aurora.plan`, and by a worker of vLLM with the plugin.

    python -m tests.import_closure [--modules]

Each case runs in a process of its own, without vLLM: a worker imports and calls what it does between its start and its first
forward pass, as far as that needs no engine. Lines are those of the files of all modules of `aurora` and `aurora_vllm` in
`sys.modules`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLAN = """
import numpy as np
import aurora
gpus = tuple(aurora.Gpu(f"g{rank}", "cpu", rank, 1e6, 1e6, 10**9) for rank in range(2))
curves = {"cpu": {phase: aurora.Curve(np.array([0.0, 1e3]), np.array([0.0, 1.0])) for phase in ("gate", "expert", "aggregate")}}
tokens_TLSE = np.random.default_rng(0).integers(1, 100, (2, 2, 2, 8))
profile = aurora.Profile("m", "f", tokens_TLSE, 2, 64, 64, 1000, 0, curves)
aurora.save(profile, folder / "profile.npz")
aurora.save(aurora.plan(aurora.Cluster("c", gpus), profile), folder / "plan.json")
"""
WORKER = """
import torch
import aurora_vllm.vllm_internals.hooks
from aurora_vllm.served_plan import Checkpoint
from aurora_vllm.settings import Settings
from aurora_vllm.plugin_status import PluginStatus
from aurora_vllm.traffic_recorder import ChoiceCounter, EngineFacts
from aurora_vllm.worker_integration import WorkerIntegration
from aurora.runtime.transports.gloo import GlooTransport
settings = Settings(plan=folder / "plan.json", record=folder, order="plan", adapt=adapts)
worker = WorkerIntegration(settings, rank, 2, Checkpoint((0, 1), "f"), 8)
assert worker.served.load() is None
worker.status = PluginStatus(settings, "m", rank, False)
facts = EngineFacts("m", "f", "vllm", "cpu", rank, 2, 2, 2, 8, 64, 64, 1000, 0)
choices = ChoiceCounter(torch.zeros(4, 2, 2, dtype=torch.int64), {0: 0, 1: 1}, 2, 8)
worker.begin_serving(facts, "m", {0: 0, 1: 1}, choices)
"""
ADAPTS = """
import aurora_vllm.vllm_internals.expert_moves
from aurora_vllm.plugin_status import ControlMetrics
metrics = ControlMetrics("m", rank)
"""
BY_EPLB = """
from aurora_vllm.eplb_mover import EplbMover
from aurora.algorithms.control.move_rounds import buffered_rounds
live = EplbMover(settings, facts, worker.served.cluster, True, lambda tensor: None, metrics)
live.next_map(torch.ones(2, 8), torch.arange(8).repeat(2, 1))
"""
CASES = {  # what is called in each process
    "import aurora": "import aurora",
    "aurora.plan": PLAN,
    "worker": "rank, adapts = 1, False" + WORKER,
    "worker that adapts by EPLB": "rank, adapts = 1, True" + WORKER + ADAPTS + BY_EPLB,
    "rank 0, which decides for EPLB": "rank, adapts = 0, True" + WORKER + ADAPTS + BY_EPLB,
}
LOADED = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[1])
exec(sys.stdin.read())
ours = {name: module.__file__ for name, module in list(sys.modules.items()) if name.split(".")[0] in ("aurora", "aurora_vllm")}
print("loaded", json.dumps(ours), flush=True)
os._exit(0)
"""


def closures() -> dict[str, dict[str, int]]:
    """Returns for each case the lines of each module of ours that it loads."""
    found: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, code in CASES.items():
            done = subprocess.run([sys.executable, "-c", LOADED, folder], input=code, capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                raise RuntimeError(f"{case}: {done.stderr}")
            modules = json.loads(done.stdout.rpartition("loaded ")[2])
            found[case] = {
                name: Path(file.replace(".abi3.so", ".py")).read_text().count("\n")
                for name, file in sorted(modules.items())
                if file
            }
    return found


def main() -> None:
    """Prints the table, and with --modules each module's lines."""
    print(f"{'':36} modules   lines")
    for case, lines in closures().items():
        print(f"{case:36} {len(lines):7} {sum(lines.values()):7}")
        if "--modules" in sys.argv:
            print(*(f"    {count:5} {name}" for name, count in lines.items()), sep="\n")


if __name__ == "__main__":
    main()
