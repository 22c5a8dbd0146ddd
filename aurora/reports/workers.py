"""Workers of a coded aggregation and what became of them, as a table."""

from collections.abc import Sequence

from rich.table import Table

from aurora.reports.tables import seconds
from aurora.types import WorkerReport


def workers_table(shares: Sequence[WorkerReport]) -> Table:
    """Returns a table of each worker's batches and final state; the title says how many workers were waited for."""
    waited = [share for share in shares if share.state in ("used", "not needed") and share.seconds is not None]
    last = max((share.seconds or 0.0 for share in waited), default=0.0)
    table = Table(title=f"waited for {len(waited)} of {len(shares)} workers, {seconds(last)}")
    for column in ("worker", "slices"):
        table.add_column(column, justify="right")
    table.add_column("state")
    table.add_column("after", justify="right")
    for share in shares:
        after = seconds(share.seconds) if share.seconds is not None else ""
        table.add_row(str(share.worker), ", ".join(map(str, share.batches)), share.state, after)
    return table
