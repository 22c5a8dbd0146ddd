"""Headlines: what the paper claims in its evaluation, and how its figures' numbers become the same quantity here."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from aurora.types.arrays import FloatArray
from bench.papers.aurora.figures import FIGURES, Run, acceleration
from bench.papers.ranges import Range

CONFIDENCE = 0.95
ENDS = ("lowest", "mean", "highest")


@dataclass(frozen=True)
class Headline:
    """A quantity that the paper claims, or that is shown beside a claim for another method or reading."""

    name: str  # the quantity
    figure: str  # name of the figure whose study gives it
    paper: Range  # as the paper states it
    values: Callable[[Run], FloatArray]  # returns (S, C) float64 from a run of that study
    why: str = ""  # why a claim is not met, if it is not; empty if this is no claim
    at_most: bool = False  # whether the claim is an upper limit


@dataclass(frozen=True)
class Measured:
    """A headline under one traffic and pricing."""

    headline: Headline
    traffic: str
    pricing: str
    seeds: int
    found: Range  # means over seeds
    half: Range  # half-widths of their confidence intervals (Student's t over seeds), None for a single seed

    @property
    def met(self) -> str:
        """Whether every number that the paper claims is reached: "yes", "no", "nearly" or "-".

        "nearly" means that only the confidence interval reaches it, "-" that the paper claims none.
        """
        sign = -1 if self.headline.at_most else 1
        short = []  # by how much, and by how many half-widths it may be
        for end in ENDS:
            claim, found, half = (getattr(r, end) for r in (self.headline.paper, self.found, self.half))
            if claim is not None:
                short.append((sign * (claim - found), half or 0.0))
        if not short:
            return "-"
        if all(by <= 0 for by, _ in short):
            return "yes"
        return "nearly" if all(by <= half for by, half in short) else "no"


def measure(headline: Headline, run: Run) -> Measured:
    """Computes a headline from a run of its study, with confidence intervals over seeds."""
    values_SC = headline.values(run)
    seeds = len(values_SC)
    ends_3S = np.stack([values_SC.min(axis=1), values_SC.mean(axis=1), values_SC.max(axis=1)])
    half = Range()
    if seeds > 1:
        student = float(stdtrit(seeds - 1, (1 + CONFIDENCE) / 2))
        half = Range(*(student * ends_3S.std(axis=1, ddof=1) / np.sqrt(seeds)).tolist())
    return Measured(headline, run.traffic, run.pricing, seeds, Range(*ends_3S.mean(axis=1).tolist()), half)


def measured(runs: list[Run]) -> list[Measured]:
    """Returns every headline of every run, in the order of HEADLINES."""
    return [measure(line, run) for line in HEADLINES for run in runs if run.study == FIGURES[line.figure].study]


def _speed(way: str, over: str = "Aurora") -> Callable[[Run], FloatArray]:
    return lambda run: run.seconds(way) / run.seconds(over)


def _busier(than: str) -> Callable[[Run], FloatArray]:
    return lambda run: run.utilisation("Aurora") / run.utilisation(than)


def _lost(run: Run) -> FloatArray:
    """The part of the acceleration that 75 % of foreign traffic takes away."""
    return 1 - acceleration(run, 75) / acceleration(run, 0)


def _stale(run: Run) -> FloatArray:
    """How much longer the first layer's plan takes than one made for the mixed traffic."""
    return run.seconds("Aurora, 75 %") / run.seconds("planned again, 75 %") - 1


EQUAL, MIXED = Range(1.25, None, 2.38), Range(1.91, None, 3.54)
LINA_BUSY, FOREIGN = Range(1.28, None, 1.50), Range(None, None, 0.158)

# Why a headline is not met, where it is not.
ORDER = """\
What SJF loses depends on how alike the sources are. Where all senders rank receivers alike, as with the recorded
traffic, they queue at the same one after another and lose more than the paper's; drawn sources differ more, and lose
less."""
ASSIGN = """\
What there is to gain is the skew, which is the traffic's. With equal tokens a source the slowest GPUs send their
share at 40 Gbps wherever experts sit, and recorded Mixtral's experts are nearly equally popular. The simulator draws
one random assignment a case instead of 16, and a lucky one can match the plan."""
LINA = """\
By the paper's own formulas both ways put two experts and two shards on every GPU, so both push the same bytes through
the same ports: Lina's model waits for twice its busiest pair, Aurora's two models for 2 |N_a + N_b|, and Lina keeps
about a quarter of its tokens local against an eighth. With equal tokens only the choice of partners differs, and the
text names nothing else that would give the paper's range. Lina's tokens left unordered give a part of it, and the
larger of two unequal models gains while the smaller one waits for it (same-images). Read causally, and in the
simulator, each model also waits for the other's phases, and where communication dominates this far Aurora's two
models on all GPUs can take longer than Lina's one on half of them."""
LINA_MIXED = """\
As in Fig. 11c. On mixed GPUs more is gained because Lina's pairs sit at random here, as the paper's jump from its
equal case suggests; placed by load they lose most of that."""
BUSY = """\
Computation is the same for both, so this is the inference time's ratio again, with the same causes as in Fig. 11c."""
DOUBLE = """\
As printed the paper's range lies inside ours, whose spread is wider: a case compares two models' shared layer with
one model's own, and a model that is fast when exclusive gains least beside a slow one. The causal reading
and the simulator let combines wait for their experts, which costs a part of the gain."""
OPTIMAL = """\
The two matchings know nothing of Table 2: the first pairs experts before it is known which GPU's ports they get. Local
search from there is the row beside."""
STALE = """\
Layers' popular experts are drawn independently here, so a plan of the first layer knows nothing of three quarters of
this traffic; and mixed traffic is more even, which leaves less to accelerate for any plan. The rows "over planned
again" hold the first cause only. Recorded traffic is so even that there is little to lose."""

HEADLINES: tuple[Headline, ...] = (
    Headline("order: SJF / Aurora", "11a", Range(None, None, 1.38), _speed("SJF"), ORDER),
    Headline("order: RCS / Aurora", "11a", Range(), _speed("RCS")),
    Headline("assignment: RGA / Aurora", "11b", Range(1.36, None, 1.81), _speed("RGA"), ASSIGN),
    Headline("assignment: RGA / ours", "11b", Range(1.36, None, 1.81), _speed("RGA", "ours")),
    Headline("equal: Lina on half / Aurora", "11c", EQUAL, _speed("Lina, half"), LINA),
    Headline("equal: Lina on half in random order / Aurora", "11c", EQUAL, _speed("Lina, half, RCS")),
    Headline("equal: Lina on all in turn / Aurora", "11c", EQUAL, _speed("Lina, all in turn")),
    Headline("equal: REC / Aurora", "11c", Range(), _speed("REC")),
    Headline("mixed: Lina on half / Aurora", "11d", MIXED, _speed("Lina, half"), LINA_MIXED),
    Headline("mixed: Lina on half in random order / Aurora", "11d", MIXED, _speed("Lina, half, RCS")),
    Headline("mixed: Lina on half by load / Aurora", "11d", MIXED, _speed("Lina, half, by load")),
    Headline("mixed: Lina on all in turn / Aurora", "11d", MIXED, _speed("Lina, all in turn")),
    Headline("mixed: RGA + REC / Aurora", "11d", Range(), _speed("RGA + REC")),
    Headline("mixed: RGA + REC / ours", "11d", Range(), _speed("RGA + REC", "ours")),
    Headline("equal: utilisation, Aurora / Lina on half", "12a", LINA_BUSY, _busier("Lina, half"), BUSY),
    Headline("equal: utilisation, Aurora / Lina on half in random order", "12a", LINA_BUSY, _busier("Lina, half, RCS")),
    Headline("equal: utilisation, Aurora / Lina on all in turn", "12a", LINA_BUSY, _busier("Lina, all in turn")),
    Headline("equal: utilisation, Aurora / exclusive", "12a", Range(1.57, None, 1.72), _busier("exclusive"), DOUBLE),
    Headline("mixed: utilisation, Aurora / Lina on half", "12b", Range(), _busier("Lina, half")),
    Headline("mixed: utilisation, Aurora / exclusive", "12b", Range(), _busier("exclusive")),
    Headline("Aurora / optimum", "13", Range(None, 1.07, None), _speed("Aurora", "optimum"), OPTIMAL, at_most=True),
    Headline("ours / optimum", "13", Range(None, 1.07, None), _speed("ours", "optimum"), at_most=True),
    Headline("exclusive: acceleration lost at 75 % foreign", "14a", FOREIGN, _lost, STALE, at_most=True),
    Headline("exclusive: time over planned again at 75 %", "14a", FOREIGN, _stale, at_most=True),
    Headline("colocated: acceleration lost at 75 % foreign", "14b", FOREIGN, _lost, STALE, at_most=True),
    Headline("colocated: time over planned again at 75 %", "14b", FOREIGN, _stale, at_most=True),
)
