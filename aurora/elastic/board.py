"""Board of an elastic run: what each member says in a round at the lighthouse, and what follows from it for all alike.

A round's entries go to all who took part in it, so they come to the same conclusions and have nothing else to agree on. A
member serves in an epoch, or waits for the next. An epoch is over when one of its members is missing from a round or has left
it. The next one begins at the first round in which nobody serves.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec import Struct


class Entry(Struct, frozen=True):
    """Entry of a member in a round: who it is, and where it stands.

    Args:
        name: tells it from the others; ranks ascend with names.
        process: tells its process from another of the same name.
        since_ms: when the process began, in milliseconds since 1970: of two processes of a name the first keeps it.
        store: address of the torch.distributed store that it serves, for the epochs of which it is the first member.
        epoch: number of the last epoch that it was in, 0 if none.
        serving: whether it still is.
        agreed: whether it has left that epoch by agreement with all its members, so that nobody has to be stopped.
        unseen: how many members of that epoch took part in no round since the lighthouse was lost and found again.
        waited_s: seconds that it has waited for the next epoch.
        expected: how many members the first epoch waits for; the greatest counts, here and in `least`.
        least: how many members every epoch has at least.
        data: what the members of the next epoch are told of it; JSON.
    """

    name: str
    process: str
    since_ms: int
    store: str = ""
    epoch: int = 0
    serving: bool = False
    agreed: bool = False
    unseen: int = 0
    waited_s: float = 0.0
    expected: int = 1
    least: int = 1
    data: Any = None


def by_name(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Returns the entries by ascending name; of two processes of a name, that of the later epoch, or of the first to begin."""
    found: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda each: (each.name, -each.epoch, each.since_ms, each.process)):
        found.setdefault(entry.name, entry)
    return found


def over(entries: Mapping[str, Entry], number: int, processes: Mapping[str, str], unseen: Collection[str] = ()) -> str | None:
    """Returns in a sentence why an epoch is over, None if it goes on.

    Args:
        entries: of the round, by name.
        number: of the epoch.
        processes: of its members, by name.
        unseen: members that need not take part yet, since the lighthouse was not reached for a while.
    """
    for name, process in processes.items():
        entry = entries.get(name)
        if entry is None or entry.process != process:
            if name not in unseen:
                return f"{name} was lost"
        elif entry.epoch != number or not (entry.serving or entry.agreed):
            return f"{name} has left the epoch"
    return None


def others_wait(entries: Mapping[str, Entry], processes: Mapping[str, str]) -> bool:
    """Returns whether someone who is no member of an epoch waits for the next one."""
    return any(not entry.serving and processes.get(name) != entry.process for name, entry in entries.items())


def next_epoch(entries: Mapping[str, Entry], now_ms: int, absent_s: float) -> int:
    """Returns the number of the epoch that begins with a round, 0 if none does.

    It is greater than that of every epoch before: the lighthouse's clock keeps it from numbers that nobody here remembers.

    Args:
        entries: of the round, by name.
        now_ms: when the round ended, by the lighthouse's clock, in milliseconds since 1970.
        absent_s: seconds after the last arrival for which the first epoch waits for more members than there are.
    """
    everyone = entries.values()
    if any(entry.serving or entry.unseen for entry in everyone) or len(entries) < max(
        (entry.least for entry in everyone), default=1
    ):
        return 0
    latest = max(entry.epoch for entry in everyone)
    few = len(entries) < max(entry.expected for entry in everyone)
    if latest == 0 and few and min(entry.waited_s for entry in everyone) < absent_s:
        return 0
    return max(latest + 1, now_ms)
