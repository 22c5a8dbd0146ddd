"""Table and picture of a replay of changing traffic: how ways to follow it did."""

from pathlib import Path

from rich.table import Column, Table

from aurora.reports.formatting import percent, right, seconds, size
from aurora.reports.pictures import canvas, save_picture
from aurora.simulator.changing_traffic import WHOLE, FollowedTraffic
from aurora.types.arrays import gap

COLOURS = ("#999999", "#8a8d1b", "#56b4e9", "#0072b2", "#7b6bb5", "#d55e00", "#e69f00", "#009e73")


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


def draw_followed(followed: FollowedTraffic, path: Path) -> list[Path]:
    """Draws the slowest GPUs' load and the bytes moved, window by window. Returns the files written, SVG and PNG.

    Args:
        followed: what to draw.
        path: the files, without suffix or with any.
    """
    drawn = canvas(9.0, 5.6)
    loads, moves, domains = drawn.subplots(3, 1, sharex=True, height_ratios=(4, 2, 1))
    for each, colour in zip(followed.ways, COLOURS, strict=False):
        loads.plot(each.slowest_W, color=colour, linewidth=1.2, label=each.name)
        moves.plot(each.bytes_W.cumsum() / 1e9, color=colour, linewidth=1.2)
    domains.stackplot(range(len(followed.traffic.part_WD)), followed.traffic.part_WD.T, step="post")
    loads.set_ylabel("slowest GPU / mean")
    moves.set_ylabel("GB moved")
    moves.set_ylim(bottom=0)
    moves.set_yscale("symlog", linthresh=max(1e-9, 1e-3 * max(float(each.bytes_W.sum()) for each in followed.ways) / 1e9))
    domains.set_ylabel("traffic")
    domains.set_yticks([])
    domains.set_xlabel("window")
    loads.legend(fontsize="x-small", ncols=4)
    return save_picture(drawn, path.parent, path.with_suffix("").name)
