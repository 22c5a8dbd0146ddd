"""Chooses among compared ways of serving: the way to recommend, and the fastest way with the fewest changes."""

from collections.abc import Callable, Sequence

from aurora.advisor.engines.engine import Layout
from aurora.advisor.engines.exchanges import EXCHANGES
from aurora.advisor.served_ways import ComparedWay, WaysOfServing
from aurora.planner.choice import TIE

WORTH = 1.02  # a candidate is worth it if the gain's lower end is above


def best_way(served: WaysOfServing) -> ComparedWay | None:
    """Returns the way to recommend; None if no way qualifies.

    A way qualifies if the engine has it, somebody published times of its exchange, and its gain is above WORTH even at the
    lower end of its interval; a way with EPLB only if EPLB pays (`WaysOfServing.eplb`). Of these ways the `simplest` is taken,
    by tokens per second.
    """
    pays = served.eplb is not None and served.eplb.advice == "eplb"
    known = [other for other in served.others if published(served, other)]
    sure = [other for other in known if other.way and other.low > WORTH and (pays or not other.way.eplb)]
    return simplest(served, sure, lambda other: other.service.tokens_per_s) if sure else None


def published(served: WaysOfServing, other: ComparedWay) -> bool:
    """Returns whether a way's exchange is the default's, or one of which somebody published times."""
    assert served.default.way is not None
    return (
        other.way is None or bool(EXCHANGES[other.way.exchange].measured) or other.way.exchange == served.default.way.exchange
    )


def simplest(served: WaysOfServing, ways: Sequence[ComparedWay], rate: Callable[[ComparedWay], float]) -> ComparedWay:
    """Returns the way with the fewest changes among the fastest.

    First the layout and exchange are chosen: of those within the error of computed steps of the highest rate,
    one that needs nothing installed is preferred, then the one with the fewest changes. Then, of the ways with both within TIE
    of the highest rate, the one with the fewest changes.

    Args:
        served: the comparison.
        ways: one or more ways of it that the engine has.
        rate: function that returns a way's rate, such as its tokens per second.
    """

    def settings(other: ComparedWay) -> tuple[Layout, str, bool]:
        assert other.way is not None
        return other.way.layout, other.way.exchange, other.way.overlap

    def fewest(ways: Sequence[ComparedWay], within: float) -> ComparedWay:
        most = max(map(rate, ways))
        near = [other for other in ways if rate(other) * within >= most]
        return min(near, key=lambda other: (bool(installs(served, other)), len(other.changes), -rate(other)))

    best_of = {settings(other): other for other in sorted(ways, key=rate)}
    chosen = settings(fewest(list(best_of.values()), served.error))
    return fewest([other for other in ways if settings(other) == chosen], TIE)


def installs(served: WaysOfServing, other: ComparedWay) -> str:
    """Returns a text with the software or hardware that a way needs beyond the engine's default; empty: none."""
    assert served.default.way is not None
    return "" if other.way is None or other.way.exchange == served.default.way.exchange else EXCHANGES[other.way.exchange].needs
