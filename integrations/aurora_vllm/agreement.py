"""Agreement of all ranks before the model is built: either every rank serves by the plan, or none does."""

import datetime
import json
from typing import Any, NamedTuple

ACCEPTED = "go"
REPLY_MARGIN_S = 10.0  # other ranks wait this much longer for rank 0's verdict than rank 0 waits for their reports


class Verdict(NamedTuple):
    """Verdict that the ranks agreed on."""

    refusal: str | None  # why the ranks do not serve by the plan; None if they do
    report_here: bool  # whether this rank is the one that logs the refusal


def agree(
    store: Any, key: str, rank: int, ranks: int, fingerprint: str, refusal: str | None, timeout_s: float
) -> Verdict:  # fmt: skip
    """Reports this rank's state to the others and returns the verdict, which is the same on all ranks.

    Rank 0 decides. If it does not answer in time, the first rank that gives up decides for all.

    Args:
        store: a torch.distributed Store that all ranks reach.
        key: prefix of the store's keys.
        rank: this rank.
        ranks: number of ranks.
        fingerprint: digest of the plan and settings, which must be equal on all ranks.
        refusal: why this rank cannot serve by the plan; None if it can.
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
