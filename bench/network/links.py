"""Rates that `aurora measure links` finds on a real network whose rates are known: hosts as network namespaces.

    python bench/network/links.py [--hosts 4] [--decode [--repetitions 9]]

Root only (namespaces, token buckets); elsewhere it says why it is skipped. Ports of 200 Mbit/s, or of 400/320/200/160; switch
buffers of 16 MB a port; reno. Expected of a pair is the slower of its two ports at the rate that TCP leaves (1448/1514), of a
port with all others its own. With --decode: exchanges of 1 to 64 tokens a rank, and what the simulator predicts of them from
the links as measured just before. Everything is removed at the end, also
after an error or an interrupt. Writes bench/results/links-DATE.md.
"""

import argparse
import os
import statistics
import tempfile

import numpy as np
from hosts import ExchangeJob, all_ready, find_links, measure_after_links
from net import PAYLOAD, network
from protocol import DEEP, Results, options

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.switch import steps_seconds
from aurora.profiler.link_timing import cluster_of
from aurora.runtime.distributed.launcher import launch
from aurora.types import Gpu, Network

MIX_bps = (400e6, 320e6, 200e6, 160e6)
TOKENS = (1, 2, 4, 8, 16, 32, 64)  # of each rank in a decode step
TOP_K, ROW_BYTES, DRAWS = 4, 4096, 3  # of a model with 2048 numbers a token in bfloat16; matrices for each number of tokens
BURST_S = 0.0008  # that a port lets pass at once: so short that it holds its rate for small exchanges too, as a NIC does
METHODS = ("all-at-once", "openshop-best")


def apart(found: np.ndarray, expected: np.ndarray) -> str:
    """Median of the deviation and the worst."""
    off = (found / expected - 1).ravel()
    return f"{np.median(np.abs(off)):.2%} / {off[np.abs(off).argmax()]:+.2%}"


def table(rates_bps: np.ndarray) -> list[str]:
    rates_Bps, hosts_count = rates_bps / 8 * PAYLOAD, len(rates_bps)
    with network(rates_bps.tolist(), DEEP) as hosts, tempfile.TemporaryDirectory() as folder:
        links = launch(find_links, hosts_count, hosts, os.path.join(folder, "meeting"))[0]
    other = ~np.eye(hosts_count, dtype=bool)
    pair_Bps_GG = np.minimum.outer(rates_Bps, rates_Bps)
    all_but = np.array([np.delete(rates_Bps, rank).sum() for rank in range(hosts_count)])
    port_Bps_G = np.minimum(rates_Bps, all_but)
    startups_us = links.startup_s_GG[other] * 1e6
    return [
        "| what | median / worst deviation from the configured rate |",
        "|---|---|",
        f"| {other.sum()} pairs alone | {apart(links.rate_Bps_GG[other], pair_Bps_GG[other])} |",
        f"| {hosts_count} ports sending to all | {apart(links.out_Bps_G, port_Bps_G)} |",
        f"| {hosts_count} ports receiving from all | {apart(links.in_Bps_G, port_Bps_G)} |",
        "",
        f"Start-ups {startups_us.min():.0f} to {startups_us.max():.0f} us. Goodput of a receiver with {links.senders} senders "
        f"at once: {links.goodput:.1%}; incast {links.incast:.3f}.",
    ]


def decode_jobs(ranks: int) -> list[ExchangeJob]:
    """All-to-alls of decode steps: experts of a token lie on ranks drawn anew, those of its own rank are not sent."""
    rng, jobs = np.random.default_rng(0), []
    for tokens in TOKENS:
        for draw in range(DRAWS):
            bytes_GG = ROW_BYTES * rng.multinomial(tokens * TOP_K, np.full(ranks, 1 / ranks), ranks)
            np.fill_diagonal(bytes_GG, 0)
            jobs += [ExchangeJob(f"{tokens} {draw}", method, bytes_GG) for method in METHODS]
    return jobs


def decode_table(rates_bps: np.ndarray, repetitions: int) -> list[str]:
    """Exchanges of decode steps against their predictions; an error is |predicted / median of repetitions - 1|."""
    rates_Bps, ranks = rates_bps / 8 * PAYLOAD, len(rates_bps)
    jobs = decode_jobs(ranks)
    with network(rates_bps.tolist(), DEEP, burst_s=BURST_S) as hosts, tempfile.TemporaryDirectory() as folder:
        found = launch(measure_after_links, ranks, hosts, os.path.join(folder, "meeting"), jobs, rates_Bps, repetitions)
    measured = cluster_of(found[0][1], [Gpu(host, "cpu", node, 1.0, 1.0, 1) for node, host in enumerate(hosts)])
    took_s = [statistics.median(seconds) for seconds in all_ready([spans for spans, _ in found])]
    planned = Network(rates_Bps, rates_Bps)
    rows: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for job, measured_s in zip(jobs, took_s, strict=True):
        order = ORDER[job.method](job.bytes_GG, planned, rng=np.random.default_rng(0))
        predicted_s = steps_seconds(order, job.bytes_GG[None], measured.network)
        rows.setdefault((job.method, int(job.case.split()[0])), []).append((measured_s, predicted_s))
    lines = ["| order | tokens a rank | measured, ms | predicted, ms | off |", "|---|---|---|---|---|"]
    for (method, tokens), found_X in sorted(rows.items()):
        measured_X, predicted_X = np.array(found_X).T
        cell = f"{np.median(predicted_X) * 1e3:.2f} | {np.median(predicted_X / measured_X - 1):+.0%}"
        lines.append(f"| {method} | {tokens} | {np.median(measured_X) * 1e3:.2f} | {cell} |")
    measured_X, predicted_X = np.concatenate([np.array(found_X) for found_X in rows.values()]).T
    error_X = np.abs(predicted_X / measured_X - 1)
    found = f"Median error {np.median(error_X):.1%}, 90th percentile {np.quantile(error_X, 0.9):.1%}."
    return [
        *lines,
        "",
        found,
        "",
        f"{repetitions} repetitions, from the last rank's start; top-{TOP_K}, {ROW_BYTES} bytes a row.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--decode", action="store_true", help="exchanges of decode steps instead of rates")
    parser.add_argument("--repetitions", type=int, default=9)
    chosen = options(parser)
    results, count = Results("links", "Links found on a real network", chosen.out), chosen.hosts
    mixed_bps = np.array(MIX_bps)[np.arange(count) * 4 // count]
    for name, rates_bps in (
        (f"{count} hosts of 200 Mbit/s", np.full(count, 200e6)),
        (f"{count} hosts of 400/320/200/160", mixed_bps),
    ):
        if chosen.decode:
            results.add(f"{name}: decode steps", *decode_table(rates_bps, chosen.repetitions))
        else:
            results.add(name, *table(rates_bps))


if __name__ == "__main__":
    main()
