"""Two models' experts on one GPU: in turn, on two streams, in threads, in processes without and with MPS.

Usage: python -m bench.gpu.colocated [--processes FILE]. Figures are times over those in turn.
"""

import argparse
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from aurora.runtime.distributed.launcher import RankInfo, launch
from aurora.runtime.transports.process_groups import default_process_group
from bench.gpu.device import Cuda, chosen, report
from bench.gpu.experts import made_experts

HIDDEN, INNER, EXPERTS = 4096, 2048, 8
TOKENS, LOOPS = (8, 128, 2048), 200
Call = Callable[[], object]
MPS = Path("mps.json")  # seconds of processes that ran under MPS, if they did


def call_of(device: Cuda, tokens: int) -> Call:
    """Returns a call of a model's experts."""
    hidden, inner = (32, 16) if device.dry else (HIDDEN, INNER)
    experts = made_experts(device, hidden, inner, EXPERTS)
    states = torch.randn(tokens, hidden, device=device.name).bfloat16()
    index = torch.rand(tokens, EXPERTS, device=device.name).topk(2).indices
    return partial(experts, states, index, torch.ones(tokens, 2, device=device.name, dtype=torch.bfloat16))


def seconds(device: Cuda, call: Call, loops: int) -> tuple[float, float]:
    """Returns when so many calls began and ended, by time.monotonic."""
    call()
    device.synchronize()
    began_s = time.monotonic()
    for _ in range(loops):
        call()
    device.synchronize()
    return began_s, time.monotonic()


def in_threads(calls: list[Call], loops: int) -> float:
    """Returns the seconds of all calls of threads, each of which queues its model's on a stream of its own."""

    def work(call: Call) -> None:
        with torch.inference_mode():
            chosen().side_by_side([lambda: [call() for _ in range(loops)]])

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    device, began_s = chosen(), time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.synchronize()
    return time.monotonic() - began_s


def one_process(rank_info: RankInfo, tokens: int, loops: int) -> tuple[float, float]:
    """One model's process. Returns when its calls began and ended."""
    device = chosen()
    call = call_of(device, tokens)
    with default_process_group(rank_info), torch.inference_mode():
        seconds(device, call, 2)
        dist.barrier()
        return seconds(device, call, loops)


def in_processes(tokens: int, loops: int) -> float:
    """Returns the seconds from the first call of two processes to the last one's end."""
    from bench.gpu import colocated  # by a name that processes can import

    spans = launch(colocated.one_process, 2, tokens, loops)
    return float(max(end_s for _, end_s in spans) - min(begin_s for begin_s, _ in spans))


def main() -> None:
    """Prints times over those in turn, by tokens of a batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=Path, help="only run processes, and write their seconds to this file")
    given = parser.parse_args()
    device, over = chosen(), {}
    loops, sizes = (2, TOKENS[:1]) if device.dry else (LOOPS, TOKENS)
    if given.processes:
        given.processes.write_text(json.dumps({tokens: in_processes(tokens, loops) for tokens in sizes}))
        return
    under_mps = json.loads(MPS.read_text()) if MPS.exists() else {}
    for tokens in sizes:
        with torch.inference_mode():
            calls = [call_of(device, tokens) for _ in range(2)]

            def in_turn(calls: list[Call] = calls) -> None:
                for call in calls:
                    call()

            ways = {"turn": seconds(device, in_turn, loops)}
            ways["streams"] = seconds(device, partial(device.side_by_side, calls), loops)
        took = {way: end_s - begin_s for way, (begin_s, end_s) in ways.items()}
        took |= {"threads": in_threads(calls, loops), "processes": in_processes(tokens, loops)}
        took |= {"processes under MPS": under_mps[str(tokens)]} if under_mps else {}
        over[tokens] = {way: round(each / took["turn"], 3) for way, each in took.items() if way != "turn"}
        print(f"{tokens} tokens, {1e6 * took['turn'] / loops:.1f} us in turn; over it: {over[tokens]}", flush=True)
    report(**{f"{way.replace(' ', '_')}_of_{tokens}": each for tokens, ways in over.items() for way, each in ways.items()})


if __name__ == "__main__":
    main()
