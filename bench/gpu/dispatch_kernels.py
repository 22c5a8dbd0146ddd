"""Dispatch kernels on one GPU: `python bench/gpu/dispatch_kernels.py` writes bench/gpu/kernels-DATE.md; CUDA and Triton only.

Rows permuted there and back beside a plain copy and beside torch; an all-to-all of one NCCL rank with itself; two models'
experts on two streams against one after the other. Times are medians of CUDA events.
"""

import datetime
import importlib.util
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    sys.exit("bench/gpu/dispatch_kernels.py: expected a CUDA device and Triton, found none; nothing was measured.")

import aurora
from aurora.moe import permutation_triton
from aurora.moe.permutation import weighted_sum

ROWS, WIDTH, TOP_K = 8192, 7168, 8


def milliseconds(call: Callable[[], object], repeats: int = 30) -> float:
    for _ in range(5):
        call()
    taken = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def permuting() -> list[str]:
    """GB/s of bytes read and written. A sum of TOP_K rows a token reads TOP_K rows for each one it writes."""
    rows = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    index = torch.randperm(ROWS, device="cuda")
    out, row_bytes = torch.empty_like(rows), WIDTH * rows.element_size()
    place = index.view(ROWS // TOP_K, TOP_K)
    weights = torch.rand(ROWS // TOP_K, TOP_K, device="cuda")
    token = torch.arange(ROWS // TOP_K, device="cuda").repeat_interleave(TOP_K)

    def torch_sum() -> torch.Tensor:
        weighted = rows[index] * weights.view(-1, 1)
        return torch.zeros(ROWS // TOP_K, WIDTH, device="cuda").index_add_(0, token, weighted).to(rows.dtype)

    def there_and_back() -> None:
        permutation_triton.gather_rows(rows, index, out)
        permutation_triton.weighted_sum(out, place, weights)

    def torch_there_and_back() -> None:
        torch.index_select(rows, 0, index, out=out)
        torch_sum()

    permutation_triton.gather_rows(rows, index, out)
    assert torch.equal(out, rows[index])
    wanted = (rows[place].float() * weights[:, :, None]).sum(dim=1)
    torch.testing.assert_close(weighted_sum(rows, place, weights).float(), wanted, rtol=2e-2, atol=2e-2)

    deduplicated, summed = 2 * ROWS * row_bytes, (ROWS + ROWS // TOP_K) * row_bytes
    copied = milliseconds(lambda: out.copy_(rows))
    copy_GBps = deduplicated / copied / 1e6
    lines = [
        f"## {ROWS} x {WIDTH} bf16: bandwidth over that of a copy ({copy_GBps:.0f} GB/s); the aim is 0.7",
        "",
        "| | Triton | torch |",
        "|---|---|---|",
    ]
    for name, size, ours, theirs in (
        ("permute", deduplicated, lambda: permutation_triton.gather_rows(rows, index, out),
         lambda: torch.index_select(rows, 0, index, out=out)),
        (f"weighted sum of {TOP_K}", summed, lambda: permutation_triton.weighted_sum(rows, place, weights), torch_sum),
        ("both", deduplicated + summed, there_and_back, torch_there_and_back),
    ):  # fmt: skip
        shares = [size / milliseconds(call) / 1e6 / copy_GBps for call in (ours, theirs)]
        lines.append(f"| {name} | {shares[0]:.2f} | {shares[1]:.2f} |")
    return lines


def alone_on_nccl() -> list[str]:
    """What stays on its rank is copied and never handed to NCCL; values and gradients are torch's."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda:0"))
    rows = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    lines = ["## One NCCL rank with itself: milliseconds", "", "| way | ms |", "|---|---|"]
    theirs = torch.empty_like(rows)
    with torch.no_grad():
        lines.append(f"| torch | {milliseconds(lambda: dist.all_to_all_single(theirs, rows)):.3f} |")
    for order in (None, "openshop"):
        ours = torch.empty_like(rows)
        aurora.all_to_all(ours, rows, order=order)
        assert torch.equal(ours, theirs)
        (gradient,) = torch.autograd.grad(ours.float().sum(), rows)
        assert bool((gradient == 1).all())
        in_background = torch.empty_like(rows)
        with torch.no_grad():
            aurora.all_to_all(in_background, rows, async_op=True, order=order).wait()
            torch.cuda.synchronize()
            assert torch.equal(in_background, theirs)
            call = lambda into=in_background, order=order: aurora.all_to_all(into, rows, order=order)  # noqa: E731
            lines.append(f"| order={order!r} | {milliseconds(call):.3f} |")
    dist.destroy_process_group()
    return lines


def two_streams() -> list[str]:
    """Two models' experts, a decode and a prefill batch each: over the time of one after the other (1.00 gains nothing)."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    lines = ["## Two models' experts on two streams over one after the other", "", "| tokens | time over |", "|---|---|"]
    config = MixtralConfig(hidden_size=4096, intermediate_size=2048, num_local_experts=8)
    config._experts_implementation = "grouped_mm"
    models = [MixtralExperts(config).to("cuda", torch.bfloat16).requires_grad_(False) for _ in range(2)]
    for model in models:
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    streams = [torch.cuda.Stream() for _ in models]
    for tokens in (8, 128, 2048):
        states = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        index = torch.rand(tokens, 8, device="cuda").topk(2).indices
        weights = torch.ones(tokens, 2, device="cuda", dtype=torch.bfloat16)

        def in_turn(states=states, index=index, weights=weights) -> None:
            for model in models:
                model(states, index, weights)

        def together(states=states, index=index, weights=weights) -> None:
            here = torch.cuda.current_stream()
            for model, stream in zip(models, streams, strict=True):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    model(states, index, weights)
            for stream in streams:
                here.wait_stream(stream)

        lines.append(f"| {tokens} | {milliseconds(together) / milliseconds(in_turn):.2f} |")
    return lines


def main() -> None:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = f"`python bench/gpu/dispatch_kernels.py` on {torch.cuda.get_device_name()}."
    lines = [f"# Dispatch kernels on a GPU, {today}", "", command]
    for section in (permuting, alone_on_nccl, two_streams):
        lines += ["", *section()]
    out = Path(__file__).parent / f"kernels-{today}.md"
    out.write_text("\n".join(lines) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main()
