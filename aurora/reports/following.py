"""Table of a replay of changing traffic: how ways to follow it did."""

from rich.table import Column, Table

from aurora.reports.formatting import percent, right, seconds, size
from aurora.simulator.changing_traffic import WHOLE, FollowedTraffic
from aurora.types.arrays import gap


def followed_table(followed: FollowedTraffic) -> Table:
    """Returns a table of the ways to follow changing traffic, beside the clairvoyant one."""
    counted_W = followed.counted_W
    best, left_out = float(followed.ways[-1].slowest_W[counted_W].mean()), int((~counted_W).sum())
    table = Table(
        Column("", no_wrap=True),
        *right("slowest GPU", "excess", f"worst {WHOLE}", "moved", "changes", "stalls"),
        title=f"{followed.change}: {len(counted_W)} windows",
        caption="slowest GPU: its load over the mean, all layers; "
        + (f"without the {left_out} windows that begin other traffic" if left_out else "all windows, each of other traffic")
        + "; excess: over clairvoyant, which rebalances for the window to come and is no bound; mean known does so for its "
        "mean, without its chance",
    )
    for each in followed.ways:
        slowest = float(each.slowest_W[counted_W].mean())
        times = (f"{slowest:.3f}", percent(gap(slowest, best)), f"{each.worst():.3f}")
        moved = (size(float(each.bytes_W.sum())), str(each.changes), seconds(each.stall_s))
        table.add_row(each.name, *times, *moved)
    return table
