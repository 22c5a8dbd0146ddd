"""Rates that `aurora measure links` finds on a real network whose rates are known: hosts as network namespaces.

    python bench/network/links.py [--hosts 4]

Root only (namespaces, token buckets); elsewhere it says why it is skipped. Ports of 200 Mbit/s, or of 400/320/200/160; switch
buffers of 16 MB a port; reno. Expected of a pair is the slower of its two ports at the rate that TCP leaves (1448/1514), of a
port with all others its own. Everything is removed at the end, also after an error or an interrupt. Writes
bench/results/links-DATE.md.
"""

import argparse
import os
import tempfile

import numpy as np
from hosts import find_links
from net import PAYLOAD, network
from protocol import DEEP, Results, options

from aurora.runtime.distributed.launcher import launch

MIX_bps = (400e6, 320e6, 200e6, 160e6)


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
    curve = ", ".join(f"{k} {g:.1%}" for k, g in zip(links.senders_K, links.goodput_K, strict=True))
    return [
        "| what | median / worst deviation from the configured rate |",
        "|---|---|",
        f"| {other.sum()} pairs alone | {apart(links.rate_Bps_GG[other], pair_Bps_GG[other])} |",
        f"| {hosts_count} ports sending to all | {apart(links.out_Bps_G, port_Bps_G)} |",
        f"| {hosts_count} ports receiving from all | {apart(links.in_Bps_G, port_Bps_G)} |",
        "",
        f"Start-ups {startups_us.min():.0f} to {startups_us.max():.0f} us. Goodput of one "
        f"receiver by senders at once: {curve}; incast {links.incast:.3f}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    chosen = options(parser)
    results, count = Results("links", "Links found on a real network", chosen.out), chosen.hosts
    mixed_bps = np.array(MIX_bps)[np.arange(count) * 4 // count]
    for name, rates_bps in (
        (f"{count} hosts of 200 Mbit/s", np.full(count, 200e6)),
        (f"{count} hosts of 400/320/200/160", mixed_bps),
    ):
        results.add(name, *table(rates_bps))


if __name__ == "__main__":
    main()
