"""All ranks serve by the plan or none does: what one lacks, all learn before the model is built."""

import datetime
import json
from typing import Any

READY = "go"
LATER_S = 10.0  # that the others wait beyond the first rank, which waits for them


def agree(
    store: Any, key: str, rank: int, ranks: int, word: str, trouble: str | None, timeout_s: float
) -> tuple[str | None, bool]:
    """(None, False) when all ranks gave the same `word`; else why not, and whether it is this rank's to say so.

    store: a torch.distributed Store that all ranks reach. trouble: what keeps this rank from serving by the plan. The first
    rank judges; whoever writes a verdict first, also for want of the first rank, has written it for all.
    """

    def heard(found: str) -> tuple[str | None, bool]:
        by, verdict = json.loads(found)
        return (None, False) if verdict == READY else (verdict, by == rank)

    def judge(verdict: str) -> tuple[str | None, bool]:
        found = store.compare_set(f"{key}/verdict", "", json.dumps([rank, verdict])).decode()
        return heard(found)

    store.set(f"{key}/{rank}", json.dumps([word, trouble]))
    if rank != 0:
        try:
            store.wait([f"{key}/verdict"], datetime.timedelta(seconds=timeout_s + LATER_S))
        except RuntimeError:
            return judge(f"rank 0 said nothing within {timeout_s + LATER_S:g} s; is the plugin there?")
        return heard(store.get(f"{key}/verdict").decode())
    try:
        store.wait([f"{key}/{other}" for other in range(ranks)], datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [str(other) for other in range(ranks) if not store.check([f"{key}/{other}"])]
        return judge(f"rank {', '.join(missing)} said nothing within {timeout_s:g} s; is the plugin there?")
    said = [json.loads(store.get(f"{key}/{other}").decode()) for other in range(ranks)]
    for other, (_, why) in enumerate(said):
        if why is not None:
            return judge(f"rank {other}: {why}")
    if odd := [other for other, (theirs, _) in enumerate(said) if theirs != said[0][0]]:
        return judge(f"rank {odd[0]}: its plan or settings are not rank 0's")
    return judge(READY)
