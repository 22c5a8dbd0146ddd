"""Agreement of a server's ranks, through a shared store, on whether to use the plan; and exchange of where they run.

Either every rank uses the plan, or none does.
"""

import datetime
import json
import multiprocessing
import os
import socket
import threading
from typing import Any, NamedTuple

ACCEPTED = "go"
AGREE_S = 60.0  # that rank 0 waits for the others' reports, before models are built
REPLY_MARGIN_S = 10.0  # other ranks wait this much longer for rank 0's verdict than rank 0 waits for their reports


class Verdict(NamedTuple):
    """Common decision of all ranks on the plan: `refusal` is None if they use it, else the reason why not."""

    refusal: str | None  # why the ranks do not serve by the plan; None if they do
    report_here: bool  # whether this rank is the one that logs the refusal


def agree(
    store: Any, key: str, rank: int, ranks: int, fingerprint: str, refusal: str | None, timeout_s: float
) -> Verdict:  # fmt: skip
    """Publishes whether this rank can use the plan, and returns the common decision, which is the same on all ranks.

    Rank 0 decides. If it does not answer in time, the first rank whose wait times out decides for all.

    Args:
        store: a torch.distributed Store that all ranks reach.
        key: prefix of the store's keys.
        rank: this rank.
        ranks: number of ranks.
        fingerprint: digest of the plan and settings, which must be equal on all ranks.
        refusal: why this rank cannot use the plan; None if it can.
        timeout_s: seconds that rank 0 waits for the others.
    """

    def decoded(verdict: bytes) -> Verdict:
        author, reason = json.loads(verdict.decode())
        return Verdict(None, False) if reason == ACCEPTED else Verdict(reason, author == rank)

    def decide(reason: str) -> Verdict:
        return decoded(store.compare_set(f"{key}/verdict", "", json.dumps([rank, reason])))

    def silent(silent_ranks: str, waited_s: float) -> Verdict:
        return decide(f"rank {silent_ranks} said nothing within {waited_s:g} s; is the plugin there?")

    store.set(f"{key}/{rank}", json.dumps([fingerprint, refusal]))
    if rank != 0:
        waited_s = timeout_s + REPLY_MARGIN_S
        try:
            store.wait([f"{key}/verdict"], datetime.timedelta(seconds=waited_s))
        except RuntimeError:
            return silent("0", waited_s)
        return decoded(store.get(f"{key}/verdict"))
    try:
        store.wait([f"{key}/{other}" for other in range(ranks)], datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [str(other) for other in range(ranks) if not store.check([f"{key}/{other}"])]
        return silent(", ".join(missing), timeout_s)
    return decide(_judge([json.loads(store.get(f"{key}/{other}").decode()) for other in range(ranks)]))


def _judge(reports_R: list[tuple[str, str | None]]) -> str:
    """ACCEPTED, or the reason why not, given every rank's (fingerprint, refusal)."""
    for rank, (_, refusal) in enumerate(reports_R):
        if refusal is not None:
            return f"rank {rank}: {refusal}"
    for rank, (fingerprint, _) in enumerate(reports_R):
        if fingerprint != reports_R[0][0]:
            return f"rank {rank}: its plan or settings are not rank 0's"
    return ACCEPTED


def publish_folder(store: Any, key: str, rank: int, folder: str) -> None:
    """Tells the other ranks, over the store, this rank's host and the folder of its status files; see `folders_here`."""
    store.set(f"{key}/host/{rank}", f"{socket.gethostname()} {folder}")


def folders_here(store: Any, key: str, ranks: int) -> dict[int, str] | None:
    """Returns the status folder of each rank that runs on this host, by rank, ascending; None if a rank has published none."""
    keys = [f"{key}/host/{rank}" for rank in range(ranks)]
    if not store.check(keys):
        return None
    published = [store.get(host_key).decode().partition(" ") for host_key in keys]
    return {rank: folder for rank, (host, _, folder) in enumerate(published) if host == socket.gethostname()}


def end_with_parent() -> None:
    """Makes this process end as soon as its parent has ended, even while a call blocks."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="aurora-parent").start()
