"""Train the two tiny MoE models that aurora ships: `python profiles/models/train.py NAME [--steps N]`.

Both are byte-level causal language models with 8 experts in each of 4 MoE layers (top-2) and learned routing, of two
different transformers architectures, trained on text that every Python installation has. The last tenth of each text is
held out; the loss and every layer's expert load are measured there and written to recipe.json beside the weights.
"""

import argparse
import hashlib
import json
import os
import platform
import pydoc_data.topics
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

HERE = Path(__file__).parent
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "output_router_logits": False,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "mixtral-topics": MixtralConfig(**SHAPE, head_dim=16, intermediate_size=56, num_local_experts=8),
    "qwen3moe-stdlib": Qwen3MoeConfig(
        **SHAPE, head_dim=16, moe_intermediate_size=56, num_experts=8, intermediate_size=56, norm_topk_prob=True
    ),
}
HELD_OUT = 0.1
FIRST_BYTE = 3  # after <pad>, </s>, <unk>
BALANCE = 0.003  # small: the routing that is learned stays skewed, but no expert takes all


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte b is token b + FIRST_BYTE."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {letter: FIRST_BYTE + i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def _byte_of(letter: str) -> int:
    """The byte that a letter of the byte-level alphabet stands for: itself where printable, else shifted beyond 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return ord(letter) if ord(letter) in printable else hidden[ord(letter) - 256]


def imbalance(router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The Switch load-balancing loss, averaged over layers (transformers' own mixes the layers before it looks)."""
    losses = []
    for logits in router_logits:
        chance = logits.softmax(dim=-1)
        taken = torch.zeros_like(chance).scatter_(1, logits.topk(2, dim=-1).indices, 1.0)
        losses.append(logits.shape[-1] * (taken.mean(dim=0) * chance.mean(dim=0)).sum() / 2)
    return torch.stack(losses).mean()


def topics() -> str:
    """The language reference that `help()` prints: about 0.46 MB of English prose."""
    return "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))


def stdlib() -> str:
    """The standard library's top-level modules: about 4.7 MB of Python source."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


TEXTS = {"mixtral-topics": topics, "qwen3moe-stdlib": stdlib}


def batches(ids_B: torch.Tensor, length: int, batch: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(0, len(ids_B) - length, (batch,), generator=generator)
    return torch.stack([ids_B[s : s + length] for s in starts.tolist()])


@torch.no_grad()
def measure(model: torch.nn.Module, ids_B: torch.Tensor, length: int) -> tuple[float, list[float]]:
    """Held-out loss (nats a byte) and each MoE layer's max/mean expert load."""
    model.eval()
    loads: dict[str, torch.Tensor] = {}

    def hook(name: str) -> object:
        def count(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            loads[name] = loads.get(name, torch.zeros(8)) + torch.bincount(args[1].flatten(), minlength=8)

        return count

    handles = [m.register_forward_pre_hook(hook(n)) for n, m in model.named_modules() if n.endswith(".experts")]
    rows = ids_B[: len(ids_B) // length * length].view(-1, length)[:128]
    losses = [float(model(input_ids=r, labels=r).loss) for r in rows.split(16)]
    for handle in handles:
        handle.remove()
    model.train()
    return sum(losses) / len(losses), [round(float(load.max() / load.mean()), 3) for load in loads.values()]


def train(model: torch.nn.Module, train_B: torch.Tensor, name: str, args: argparse.Namespace) -> float:
    """Trains for args.steps. Returns the last batch's loss, nats a byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.rate, total_steps=args.steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(args.seed)
    began, loss = time.time(), torch.tensor(0.0)
    for step in range(args.steps):
        rows = batches(train_B, args.length, args.batch, generator)
        out = model(input_ids=rows, labels=rows, output_router_logits=True)
        loss = model.loss_function(out.logits, rows, SHAPE["vocab_size"])
        (loss + BALANCE * imbalance(out.router_logits)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"{name} step {step} loss {loss.item():.3f} {time.time() - began:.0f} s", flush=True)
    return float(loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(CONFIGS))
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    text = TEXTS[args.name]()
    tokenizer = byte_tokenizer()
    ids_B = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() + FIRST_BYTE
    assert tokenizer(text[:999])["input_ids"] == ids_B[: len(text[:999].encode())].tolist()
    split = int(len(ids_B) * (1 - HELD_OUT))

    began = time.time()
    model = AutoModelForCausalLM.from_config(CONFIGS[args.name]).float()
    loss = train(model, ids_B[:split], args.name, args)
    held, loads = measure(model, ids_B[split:], args.length)
    folder = HERE / args.name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    recipe = {
        "script": "profiles/models/train.py",
        "text": TEXTS[args.name].__doc__,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "text_bytes": len(text.encode()),
        "held_out": f"the last {HELD_OUT:.0%}",
        "settings": {k: v for k, v in vars(args).items() if k != "name"},
        "optimizer": f"AdamW(weight_decay=0.01, betas=(0.9, 0.98)), one-cycle, clip 1.0; load-balancing loss {BALANCE} a layer",
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_loss_nats_per_byte": round(loss, 4),
        "held_out_loss_nats_per_byte": round(held, 4),
        "max_over_mean_load_per_layer": loads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": round(time.time() - began),
    }
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    print(json.dumps(recipe, indent=2))


if __name__ == "__main__":
    main()
