"""What dispatch and combine cost beside the network: `python bench/dispatch_kernels.py` writes bench/results/kernels-DATE.md.

Experts' matrix products by transformers' own implementations, one MoE layer's dispatch and combine over two ranks against the
same with torch's all_to_all_single, the host's work before transfers at 8 to 64 ranks, one `aurora.all_to_all` against torch's,
and the bytes that deduplication saves. What is compared is run in turn, and figures are medians.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from machine import machine
from tables import Table, today, write
from torch import nn

import aurora
from aurora.algorithms.alltoall.registry import ORDER
from aurora.io import shipped
from aurora.models.loading import load_model
from aurora.moe.expert_map import ExpertMap
from aurora.moe.layouts import RowPerExpert, RowPerRank
from aurora.runtime.distributed.launcher import RankInfo, launch
from aurora.runtime.distributed_experts import DistributedExperts
from aurora.runtime.layer_context import LayerContext
from aurora.runtime.phase_recorder import HostTimer, PhaseRecorder
from aurora.runtime.port_arbiter import thread_port_arbiters
from aurora.runtime.transports.gloo import GlooTransport
from aurora.runtime.transports.nccl import NcclTransport
from aurora.runtime.transports.ordered import Message, OrderedTransport
from aurora.runtime.transports.process_groups import default_process_group
from aurora.types import Barrier, Compute, Exchange, Network, Order, Placement, TraceRecorder

TOKENS, TOP_K, EXPERTS, WIDTH = 8, 2, 8, 1024
CALLS = 500


def medians(ways: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Median microseconds a call; the ways take turns at every call, and the first tenth does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for call in range(calls):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if call >= calls // 10:
                taken[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(values) for name, values in taken.items()}


def run_experts(module: Any, implementation: str, *arguments: torch.Tensor) -> None:
    module.config._experts_implementation = implementation
    module(*arguments)


def experts() -> list[str]:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    table = Table(
        "Experts' products, by transformers' experts implementation: time over `eager`'s (one thread)",
        "hidden x inner, experts here | dtype | rows | eager, us | batched_mm | grouped_mm",
    )
    torch.set_num_threads(1)
    for hidden, inner, held in ((64, 56, 2), (512, 256, 8), (1024, 512, 16)):
        for dtype in (torch.float32, torch.bfloat16):
            config = MixtralConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=held, num_experts_per_tok=1)
            module = MixtralExperts(config).to(dtype).requires_grad_(False)
            for parameter in module.parameters():
                parameter.normal_(0, 0.02)
            for rows in (8, 512):
                states = torch.randn(rows, hidden, dtype=dtype)
                index, ones = torch.randint(0, held, (rows, 1)), torch.ones(rows, 1, dtype=dtype)

                names = ("eager", "grouped_mm") if rows * hidden > 10**5 else ("eager", "batched_mm", "grouped_mm")
                found = medians({name: partial(run_experts, module, name, states, index, ones) for name in names}, 20)
                over = {name: f"{value / found['eager']:.2f}" for name, value in found.items()}
                table.add(
                    f"{hidden} x {inner}, {held}",
                    str(dtype).removeprefix("torch."),
                    rows,
                    f"{found['eager']:.0f}",
                    over.get("batched_mm", "not run"),
                    over["grouped_mm"],
                )
    return table.lines


class Echo(nn.Module):
    """Experts that answer what they are asked, so that only dispatch and combine are timed."""

    def __init__(self, experts: int, width: int = WIDTH) -> None:
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.empty(experts, width), requires_grad=False)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return hidden_states


def distributed(transport: Any, slots_G: tuple[tuple[int, ...], ...], deduplicate: bool) -> DistributedExperts:
    ranks = len(slots_G)
    every = np.ones((ranks, ranks), dtype=np.int64) - np.eye(ranks, dtype=np.int64)
    order = ORDER["openshop"](every, Network.equal(ranks), rng=np.random.default_rng(0))
    ops = (Compute("gate"), Barrier("counts"), Exchange("dispatch", order), Compute("expert"),
           Exchange("combine", order.reversed), Compute("aggregate"))  # fmt: skip
    recorder = PhaseRecorder(TraceRecorder("measured", ("bench",), ranks), transport.rank, 0, time.perf_counter())
    context = LayerContext(0, transport, *thread_port_arbiters(1), recorder)
    context.start_compute()
    spread = DistributedExperts(Echo(sum(map(len, slots_G))))
    spread.set_placement(Placement((slots_G,)), ops, 0, context, deduplicate)
    return spread


class Watch:
    """Seconds spent inside what it wraps, a list entry for every lap."""

    def __init__(self) -> None:
        self.laps_us, self._lap_s = [], 0.0

    def __call__(self, call: Callable[..., object]) -> Callable[..., object]:
        def timed(*arguments: object, **named: object) -> object:
            began = time.perf_counter()
            answer = call(*arguments, **named)
            self._lap_s += time.perf_counter() - began
            return answer

        return timed

    def lap(self, way: Callable[[], object]) -> None:
        self._lap_s = 0.0
        way()
        self.laps_us.append(self._lap_s * 1e6)


def plain_layer(
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor], ranks: int, exchange: Callable[..., object]
) -> torch.Tensor:
    """The same with torch's collective: counts, rows there, rows back, weighted sum."""
    hidden, index, weights = tokens
    choice = torch.argsort(index.flatten(), stable=True)
    mine = torch.bincount(index.flatten(), minlength=EXPERTS)
    theirs = torch.empty_like(mine)
    exchange(theirs, mine)
    out_sizes, in_sizes = (counts.view(ranks, -1).sum(dim=1).tolist() for counts in (mine, theirs))
    rows = hidden[choice // index.shape[1]]
    arrived, answers = rows.new_empty(sum(in_sizes), rows.shape[1]), torch.empty_like(rows)
    exchange(arrived, rows, in_sizes, out_sizes)
    exchange(answers, arrived, out_sizes, in_sizes)
    out = torch.zeros_like(hidden)
    return out.index_add_(0, choice // index.shape[1], answers * weights.flatten()[choice, None])


def on_rank(rank_info: RankInfo) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Microseconds of a layer, of them in transports, and of one all-to-all."""
    torch.set_num_threads(1)
    ranks, generator = rank_info.ranks, torch.Generator().manual_seed(rank_info.rank)
    held = EXPERTS // ranks
    slots_G = tuple(tuple(range(rank * held, (rank + 1) * held)) for rank in range(ranks))
    every = np.ones((ranks, ranks), dtype=np.int64) - np.eye(ranks, dtype=np.int64)
    order = ORDER["openshop"](every, Network.equal(ranks), rng=np.random.default_rng(0))
    tokens = (
        torch.randn(TOKENS, WIDTH, generator=generator),
        torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices,
        torch.rand(TOKENS, TOP_K, generator=generator),
    )
    with default_process_group(rank_info), torch.inference_mode():
        watches = {"torch": Watch()}
        collective = watches["torch"](dist.all_to_all_single)
        layers = {"torch": lambda: plain_layer(tokens, ranks, collective)}
        for name, deduplicated in (("a row for every choice", False), ("deduplicated", True)):
            watch, transport = Watch(), GlooTransport()
            transport.gather, transport.exchange = watch(transport.gather), watch(transport.exchange)
            watches[name], layers[name] = watch, partial(distributed(transport, slots_G, deduplicated), *tokens)
        whole = medians({name: lambda n=name, way=way: watches[n].lap(way) for name, way in layers.items()}, CALLS)
        inside = {name: statistics.median(watch.laps_us) for name, watch in watches.items()}
        rows = torch.randn(TOKENS * TOP_K, WIDTH)
        into, sizes = torch.empty_like(rows), [len(rows) // ranks] * ranks
        counts = torch.ones(EXPERTS, dtype=torch.long)
        gathered, alone = torch.empty(ranks, EXPERTS, dtype=torch.long), GlooTransport()
        calls = {
            "transport.gather of 8 counts": lambda: alone.gather(counts),
            "torch, the same as a gather": lambda: dist.all_to_all_single(gathered, counts.repeat(ranks, 1)),
            "transport.exchange": lambda: alone.exchange(order, rows.split(sizes), into.split(sizes), lambda *_: None),
            "torch": lambda: dist.all_to_all_single(into, rows, sizes, sizes),
            "order=None": lambda: aurora.all_to_all(into, rows, sizes, sizes),
            "order=Order": lambda: aurora.all_to_all(into, rows, sizes, sizes, order=order),
            'order="openshop"': lambda: aurora.all_to_all(into, rows, sizes, sizes, order="openshop"),
        }
        single = medians(calls, CALLS)
    return whole, inside, single


def layer() -> list[str]:
    from kernels import on_rank  # by the module's name: ranks look it up there

    whole, inside, single = launch(on_rank, 2)[0]
    lines = [
        f"## One layer's counts, dispatch and combine on 2 ranks: {TOKENS} tokens a rank, top {TOP_K} of {EXPERTS}, "
        f"{WIDTH} x fp32, loopback",
        "",
        "| way | us | over torch | of it in gloo and its threads, us |",
        "|---|---|---|---|",
        *(f"| {n} | {us:.0f} | {us / whole['torch']:.2f} | {inside[n]:.0f} |" for n, us in whole.items()),
        "",
        f"## One all-to-all on 2 ranks, {TOKENS * TOP_K} rows of {WIDTH} x fp32",
        "",
        "| way | us | over torch |",
        "|---|---|---|",
        *(f"| {n} | {us:.0f} | {us / single['torch']:.2f} |" for n, us in single.items()),
    ]
    print("\n".join(lines), flush=True)
    return lines


class Mirror:
    """The network of rank 0 of two that send each other the same, and takes no time."""

    rank, ranks = 0, 2

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        return row.expand(2, -1)

    def exchange(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: object) -> None:
        recvs[1].copy_(sends[1])


def local() -> list[str]:
    """Both ends' work without any network; a layer is all that a rank does, its trace and its turns included."""
    table = Table(
        "Local work of one layer's dispatch and combine, no network (one thread, fp32)",
        "tokens | top k of experts | width | torch's index and index_add, us | every choice, us "
        "| deduplicated, us | layer, every choice, us | layer, deduplicated, us",
    )
    torch.set_num_threads(1)
    for tokens, top_k, count, width in ((8, 2, 8, 1024), (512, 2, 8, 1024), (512, 8, 64, 2048)):
        slots_G = (tuple(range(count // 2)), tuple(range(count // 2, count)))
        expert_map = ExpertMap(slots_G, 0)
        hidden, weights = torch.randn(tokens, width), torch.rand(tokens, top_k)
        half = torch.rand(tokens // 2, count).topk(top_k).indices
        index = torch.cat([half, (half + count // 2) % count])  # as much for one rank as for the other

        def plain(hidden=hidden, index=index, weights=weights) -> torch.Tensor:
            choice = torch.argsort(index.flatten(), stable=True)
            token = choice // index.shape[1]
            answers = hidden[token]
            return torch.zeros_like(hidden).index_add_(0, token, answers * weights.flatten()[choice, None])

        def every(expert_map=expert_map, hidden=hidden, index=index, weights=weights) -> torch.Tensor:
            layout = RowPerExpert(expert_map, hidden, index, weights, None)
            return layout.aggregate(layout.rows)

        def deduplicated(expert_map=expert_map, hidden=hidden, index=index, weights=weights) -> torch.Tensor:
            layout = RowPerRank(expert_map, hidden, index, weights, None)
            return layout.aggregate(layout.compute(layout.rows, lambda rows, *_: rows))

        ways: dict[str, Callable[[], object]] = {"plain": plain, "every": every, "once": deduplicated}
        for name, deduplicate in (("layer", False), ("layer once", True)):
            spread = distributed(Mirror(), slots_G, deduplicate)
            ways[name] = partial(spread, hidden, index, weights)
        with torch.inference_mode():
            found = medians(ways, 30 if tokens > 8 else 300)
        cells = " | ".join(f"{us:.0f}" for us in found.values())
        table.add(tokens, f"{top_k} of {count}", width, cells)
    return table.lines


class Nowhere(OrderedTransport):
    """A transport whose messages take no time; `posted_s` is when the first one was posted."""

    posted_s = 0.0

    def _send(self, message: Message) -> "Nowhere":
        self.posted_s = self.posted_s or time.perf_counter()
        return self

    _receive = _send

    def wait(self) -> None:
        pass


class NowhereCalls:
    """GroupedCalls that do nothing; `posted_s` is when the first one was posted."""

    device, posted_s = "cpu", 0.0

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks, self.timer = 0, ranks, HostTimer(0.0)

    def post(self, ends: Sequence[object]) -> None:
        self.posted_s = self.posted_s or time.perf_counter()

    def abort(self) -> None:
        pass


def until_posted(poster: Any, way: Callable[[], object]) -> float:
    """Microseconds until a way posts its first transfer."""
    poster.posted_s, began_s = 0.0, time.perf_counter()
    way()
    return (poster.posted_s - began_s) * 1e6


def before_posting() -> list[str]:
    """The host's work of rank 0 for one dispatch: what does not depend on the network."""
    tokens, width, top_k, calls = 16, 2048, 8, 60
    table = Table(
        f"Host work of one rank for a dispatch until it posts a transfer, us: {tokens} tokens a rank, top {top_k} of 256, "
        f"{width} x bf16 (one thread, medians of {calls}); the aim is 200 in all at 32 ranks and 500 at 64",
        "ranks | layout | order, of rows | layout | sizes and splits | messages | stages | in all, with messages | with stages",
    )
    torch.set_num_threads(1)
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    for ranks, kind, method in product((8, 32, 64), (RowPerExpert, RowPerRank), ("openshop", "birkhoff")):
        traffic_GG = rng.integers(1, 10**6, (ranks, ranks))
        np.fill_diagonal(traffic_GG, 0)
        order = ORDER[method](traffic_GG, Network.equal(ranks), rng=rng)
        held = 256 // ranks
        expert_map = ExpertMap(tuple(tuple(range(rank * held, (rank + 1) * held)) for rank in range(ranks)), 0)
        drawn = [torch.rand(tokens, 256, generator=generator).topk(top_k).indices for _ in range(ranks)]
        hidden, weights = torch.randn(tokens, width).bfloat16(), torch.rand(tokens, top_k)
        layout_R = [kind(expert_map, hidden, index, weights, None) for index in drawn]
        counts = torch.stack([layout.counts for layout in layout_R])

        def split(layout=layout_R[0], counts=counts) -> tuple[Sequence[torch.Tensor], ...]:
            layout.gathered(counts)
            sizes_RR = layout.sizes_SRR[0]
            out_sizes, in_sizes = sizes_RR[0].tolist(), sizes_RR[:, 0].tolist()
            arrived = layout.rows.new_empty(sum(in_sizes), layout.rows.shape[1])
            return layout.rows.split_with_sizes(out_sizes), arrived.split_with_sizes(in_sizes)

        poster, calls_ = Nowhere(0, ranks), NowhereCalls(ranks)
        stages, tensors = NcclTransport(calls_, None), split()
        ways: dict[str, Callable[[], object]] = {
            "layout": partial(kind, expert_map, hidden, drawn[0], weights, None),
            "split": split,
        }
        taken: dict[str, list[float]] = {"messages": [], "stages": []}
        with torch.inference_mode():
            found = medians(ways, calls)
            for _ in range(calls):
                ignore = lambda *_: None  # noqa: E731
                taken["messages"].append(until_posted(poster, partial(poster.exchange, order, *tensors, ignore)))
                taken["stages"].append(until_posted(calls_, partial(stages.exchange, order, *tensors, ignore)))
        found |= {name: statistics.median(values) for name, values in taken.items()}
        shared = found["layout"] + found["split"]
        table.add(
            ranks, kind.__name__, f"{method}, {len(order.pairs_X2)}", *(f"{us:.0f}" for us in found.values()),
            f"{shared + found['messages']:.0f}", f"{shared + found['stages']:.0f}",
        )  # fmt: skip
    return table.lines


def saved() -> list[str]:
    """Both all-to-alls' bytes with deduplication over those without; tokens that stay on their rank count in neither."""
    table = Table(
        "Bytes of dispatch and combine with deduplication, over those without",
        "routing | width and dtype | 2 ranks | 4 ranks | 8 ranks",
    )
    routings: list[tuple[str, list[torch.Tensor], int, int, torch.dtype]] = []
    for name in ("mixtral-topics", "qwen3moe-stdlib"):
        model, seen = load_model(shipped(f"models/{name}")), []
        hooks = [one.experts.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[1])) for one in model.layers]
        ids = model.tokenizer("def merge(a, b): return a + b  # the quick brown fox over the lazy dog " * 6)["input_ids"]
        with torch.inference_mode():
            model.model(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        routings.append((f"{name}, top {model.top_k} of {model.experts}", seen, model.experts, model.hidden, torch.float32))
    for title, top_k, count, width in (("uniform, top 2 of 8", 2, 8, 4096), ("uniform, top 8 of 64", 8, 64, 2048),
                                       ("uniform, top 8 of 256", 8, 256, 7168)):  # fmt: skip
        index = torch.rand(4096, count, generator=torch.Generator().manual_seed(0)).topk(top_k).indices
        routings.append((title, [index], count, width, torch.bfloat16))
    for title, seen, count, width, dtype in routings:
        cells = []
        for ranks in (2, 4, 8):
            slots_G = tuple(tuple(range(r * count // ranks, (r + 1) * count // ranks)) for r in range(ranks))
            moved = {RowPerExpert: 0, RowPerRank: 0}
            for index in seen:
                for kind in moved:
                    layout = kind(
                        ExpertMap(slots_G, 0), torch.zeros(len(index), width, dtype=dtype), index, torch.ones(index.shape), None
                    )
                    layout.gathered(layout.counts.expand(ranks, -1).contiguous())
                    rows = layout.sizes_SRR[0, 0, 1:].sum()
                    moved[kind] += rows * (layout.rows.shape[1] * layout.rows.element_size() + width * dtype.itemsize)
            cells.append(f"{moved[RowPerRank] / moved[RowPerExpert]:.3f}")
        table.add(title, f"{width} x {str(dtype).removeprefix('torch.')}", *cells)
    return table.lines


def main() -> None:
    parts = [part() for part in (layer, local, before_posting, experts, saved)]
    load = f"Load average at the end: {os.getloadavg()[0]:.1f}."
    command = f"`python bench/dispatch_kernels.py` on {machine()}. {load}"
    write("kernels", [f"# Dispatch kernels, {today()}", "", command], *parts)


if __name__ == "__main__":
    main()
