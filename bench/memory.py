"""Memory that a rank takes for its weights: `python bench/memory.py` writes bench/results/memory-DATE.md.

Makes a checkpoint of 3 GB in bfloat16 (`--layers` for another size) and loads each rank's share in a process of its own, one
after the other. What counts is anonymous resident memory, its rise after a first small model: pages of files do not.
"""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from machine import machine
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from aurora.io import shipped
from aurora.models.loading import load_model
from aurora.models.own_weights import load_without_experts
from aurora.runtime.distributed_experts import DistributedExperts

ROOT = Path(__file__).parents[1]
EXPERTS, RANKS = 16, 4
SHAPE = {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 8,
         "vocab_size": 32000, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="MoE layers, of 0.35 GB each")
    parser.add_argument("--load", nargs="+", help=argparse.SUPPRESS)  # folder, dtype, experts: the process that is measured
    options = parser.parse_args()
    if options.load:
        print(json.dumps(_measure(options.load[0], options.load[1], [int(expert) for expert in options.load[2:]])))
        return
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    with tempfile.TemporaryDirectory() as folder:
        size = _write_checkpoint(Path(folder), options.layers)
        lines = [
            f"# Memory of a rank's weights, {date}",
            "",
            f"`python bench/memory.py --layers {options.layers}` on {machine()}; torch {torch.__version__}.",
            f"A Mixtral of {options.layers} layers with {EXPERTS} experts, {size / 1e9:.2f} GB of bfloat16, a file a layer.",
            f"{RANKS} ranks, every {RANKS}th expert each. Megabytes of anonymous memory, after loading and at most meanwhile.",
            "In bfloat16 dense weights stay pages of the files, which ranks of a machine share, and do not count; in float32,",
            "which a CPU computes in by default, they are a rank's own.",
            "",
            "| weights as | who | dense | own experts | memory after | of dense + own | at most |",
            "|---|---|---|---|---|---|---|",
        ]
        ranks = [("float32", f"rank {rank}", list(range(rank, EXPERTS, RANKS))) for rank in range(RANKS)]
        for dtype, who, held in [*ranks, ("bfloat16", *ranks[0][1:]), ("bfloat16", "all in one", [])]:
            command = [sys.executable, __file__, "--load", folder, dtype, *map(str, held)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            dense, own, after, most = (found[key] / 1e6 for key in ("dense", "own", "after", "most"))
            lines.append(
                f"| {dtype} | {who} | {dense:.0f} | {own:.0f} | {after:.0f} | {after / (dense + own):.1%} | {most:.0f} |"
            )
            print(lines[-1], flush=True)
    (ROOT / "bench" / "results" / f"memory-{date}.md").write_text("\n".join(lines) + "\n")


def _write_checkpoint(folder: Path, layers: int) -> int:
    """Writes a checkpoint as its makers publish them, one tensor for each expert's matrix. Returns its bytes."""
    config = MixtralConfig(**SHAPE, num_hidden_layers=layers, dtype=torch.bfloat16)
    config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped("models/mixtral-topics") / file, folder)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in AutoModelForCausalLM.from_config(config).state_dict().items()}
    hidden, inner = config.hidden_size, config.intermediate_size
    matrices = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    files: dict[str, dict[str, tuple[int, ...]]] = {"dense": {}}
    for name, shape in shapes.items():
        layer, block, part = name.partition(".mlp.")
        if not part.startswith("experts."):
            files["dense"][f"{layer}.block_sparse_moe.{part}" if block else name] = tuple(shape)
    for layer in range(layers):
        names = (f"model.layers.{layer}.block_sparse_moe.experts.{expert}" for expert in range(EXPERTS))
        files[f"layer{layer}"] = {f"{name}.{part}.weight": shape for name in names for part, shape in matrices.items()}
    size = 0
    for file, tensors in files.items():
        weights = {name: torch.randn(shape, dtype=torch.bfloat16) / 64 for name, shape in tensors.items()}
        save_file(weights, folder / f"{file}.safetensors", metadata={"format": "pt"})
        size += sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {}, "weight_map": {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


def _measure(folder: str, dtype: str, held: list[int]) -> dict[str, int]:
    """Loads the dense weights and the experts `held`, or the whole model if that is empty. Returns bytes by name."""

    def load(path: str | Path, wanted: torch.dtype, experts: list[int]):  # type: ignore[no-untyped-def]
        model = load_without_experts(path, dtype=wanted) if experts else load_model(path, dtype=wanted)
        for layer in model.layers if experts else ():
            DistributedExperts(layer.experts).hold(experts)
        return model

    load(shipped("models/mixtral-topics"), torch.float32, held[:1])
    before, most, done = _anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, _anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load(folder, getattr(torch, dtype), held)
    done.set()
    watcher.join()
    after = _anonymous_bytes() - before
    own = model.expert_bytes * (len(held) or EXPERTS) * len(model.layers)
    return {"dense": model.other_bytes, "own": own, "after": after, "most": max(most, after)}


def _anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
