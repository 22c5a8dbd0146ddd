"""Lazarus' evaluation as one Markdown page and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aurora.reproduce.lazarus.evaluation import LazarusEvaluation, LazarusFigure
from aurora.reproduce.page import page, table
from aurora.reproduce.ranges import Range

SETUP = """\
Jobs and cluster are the paper's: 10 nodes of one GPU and 6 slots, 2 replicas at least, GPT-S, GPT-M and GPT-L of 8, 12 and 16
experts in 12 layers, 4 samples a GPU and step; 16 nodes in Fig. 12. Nothing is trained: a step takes its dense part and what
the busiest GPU's experts take, and a replay adds what each system does at each change of the nodes.

What the paper does not give, we assumed, and fixed before any result was seen except where it says so:

- **Loads.** The paper's routing traces are not public. Ours are Zipf, an exponent from 0.4 to 1.6 a layer, experts shuffled.
  They do not change during a run, so nothing is rebalanced (the paper: every 200 steps), and no step is slower early on.
- **Seconds of a step.** Experts take 60 % of a balanced one. Its length is set by one rate of the paper's, 45 samples a second
  for GPT-M on 10 nodes, taken as of a balanced step; the other two by the root of their parameters. Steps get no longer with
  fewer nodes but for their loads.
- **Checkpoints.** 16 bytes a parameter, over the testbed's 10 Gbps, nothing else done meanwhile; one that begins counts as
  written. DS saves every 50 steps, all others every 250; in Fig. 7 DS and DS(FT) every 200 and 1000, as in the paper.
- **Pauses.** A restart takes 60 s and reading the checkpoint, a reconfiguration 30 s (the paper: 20 to 40). Nodes that join
  wait two minutes. "slow restarts" (added when the first results were seen): 180 s, and storage at a quarter of its rate.
- **Tutel.** Steps 15 % faster than DeepSpeed's; 16 nodes with Fig. 6's GPUs and storage, not the paper's A10G on 10 Gbps.
- **Failing nodes.** Drawn; 10 draws.
- **Spot trace.** {trace}; at most 10 nodes of it, 80 minutes. The paper's is a segment of AWS P3's, which loses 4 at once.
- **Fig. 13.** DeepSeek V3's 256 experts in two layers, Zipf as above; 32 slots a node of 8 GPUs, 256 samples a node in a step
  of 20 s if balanced; 12 bytes a parameter over 50 GB/s; a restart takes 300 s and reading, a reconfiguration 40 s. A node
  fails with the given probability an hour; one that is missing is replaced in the next hour with probability one half. A day,
  3 draws (the paper: 5M samples, 10 trials). Work is counted GPU by GPU (added when the first results were seen).

Ways. **aurora**: our placement. **lazarus**, **mro**: the paper's placement, with the same runtime; **spread** and **compact**
as the paper names them. **DS** restarts from checkpoints; **DS(FT)** goes on while a whole copy of all experts is left, on a
multiple of the group's nodes; **Tutel** and **Tutel(FT)** the same on faster kernels. Probabilities are exact. Cells: the mean
over draws, with the lowest and the highest behind it; in brackets the paper's figure."""

THEOREM = """\
Theorem 1 says that no placement recovers more often than MRO's, for any replicas and any number of nodes left. It does not
hold when there are more experts than a node has slots. With four nodes of three slots and four experts of three replicas
each, MRO gives the first three experts three nodes of their own and the fourth expert the last node, three times: one failure
in four loses it, although it has three replicas and f = 3 promises that two failures are survived. `[(1,2,3), (1,2,4),
(1,3,4), (2,3,4)]` survives any two. One step of its proof that does not hold is Eq. 19: with a rarer expert taken out no
segment of nodes gets shorter, it says, but the last is what the others leave of the nodes, and does. Of the 739 small cases
that can be tried out (3 to 5 nodes of up to 3 slots, up to 5 experts, every number left alive) MRO misses the optimum in 27,
`aurora` in none."""


@dataclass(frozen=True)
class _Kind:
    """Texts of a figure."""

    title: str  # what it shows
    axis: str  # of its picture; empty: it has none
    why: str  # why ours differs


RECOVERS, SAMPLES = "every expert is left", "samples: aurora / system"
KINDS: dict[str, _Kind] = {
    "4": _Kind("the same replicas placed otherwise", "", "MRO's is the paper's plan B; its plan A, by hand, has 0.5."),
    "Theorem 1": _Kind("where the paper's theorem fails", "", THEOREM),
    "6": _Kind(
        "a node fails every 5 minutes",
        SAMPLES,
        """\
Against DS(FT) of GPT-S the same, of GPT-L by the failing nodes drawn; against DS far below. The paper gives neither the
seconds of a restart nor what its file server wrote; that DS spends over half of its time so on the spot trace (Fig. 11) asks
for pauses longer than ours, and with "slow restarts" DS is where the paper has it or beyond. The rest is skew, see Rates.""",
    ),
    "7": _Kind(
        "a node fails every 40 minutes",
        SAMPLES,
        """\
Failures hardly count here: what is left is the loads' skew, and nodes that no group can use. DS over DS(FT) is as in the paper:
it takes dropped nodes back when it restarts.""",
    ),
    "Rates": _Kind(
        "what the paper says of steps and samples",
        "",
        """\
With no failure the paper has Lazarus at 1.32 times DS for GPT-M, ours is at 1.06: its loads are more skewed than our Zipf, or
experts more than 60 % of its steps. All ratios against DS and Tutel are lower here for it. GPT-L's steps are shorter in the
paper than by the root of its parameters.""",
    ),
    "8": _Kind(
        "several nodes fail, all layers",
        RECOVERS,
        """\
All 12 layers must be left at once. The paper's loads at its two steps are not known; with ours every expert of GPT-L has two
replicas at least, and MRO's groups lie on the same nodes in all layers, which loses layers together instead of one by one. The
order of the three is the paper's. `aurora` is MRO here: nothing was found to improve.""",
    ),
    "9": _Kind(
        "spot instances", SAMPLES, "As in Fig. 6; and the recorded segment is calmer than the paper's, no 4 nodes go at once."
    ),
    "10a": _Kind(
        "skewed loads",
        "throughput / its own at 1:1",
        """\
Flat once skewed; the step down from 1:1 is that replicas are whole: 60 slots give the hot expert 15 or 30 of them only nearly
where its load wants them. DS' falls by its busier half.""",
    ),
    "10b": _Kind(
        "several nodes fail, one skewed layer",
        RECOVERS,
        """\
The paper gives no numbers. At 2:1 MRO is below round robin: eight experts on six slots are two groups, and the second gets
what nodes are left. `aurora` is the better of both.""",
    ),
    "11": _Kind(
        "where the time goes on spot instances",
        "part of 80 minutes",
        """\
The paper also says: DS over one half in checkpoints and restarts (what is lost by them included), reconfiguration below 0.1.
Ours restart faster, see Fig. 6; its 0.27 of DS(FT) on GPT-L is to be held against lost and restart together.""",
    ),
    "12": _Kind(
        "against Tutel, a node fails every 5 minutes",
        SAMPLES,
        """\
The paper accumulates gradients over 20 steps on a slow network and stores on AWS EFS, so that a checkpoint is further away and
a restart costs more; here the GPUs and the storage are Fig. 6's. Skew as under Rates.""",
    ),
    "13": _Kind(
        "DeepSeek V3, simulated",
        "time: system / lazarus",
        """\
DS(FT) is near: it is the busiest GPU's load. DS is beyond the paper wherever a node fails more often than DS can
restart and reach its next checkpoint, 50 steps on; the paper's seconds of a step and of a restart are not given.""",
    ),
    "Table 2": _Kind(
        "what moves when nodes are lost",
        "",
        """\
The paper's way is MRO with greedy relabelling; exact relabelling moves fewer replicas, and `aurora`, free to place every layer
anew, more of them on GPT-S. Ours count only what must cross the network, for which loads matter that are not known. Seconds
are those of ports of 50 Gbps, both ways at once, as two of the testbed's nodes share a card; the paper's are measured.""",
    ),
}


def as_markdown(made: LazarusEvaluation, pictures: Sequence[str]) -> str:
    """Returns the Markdown page: set-up, then for each figure a table and why our numbers differ."""
    trace = "Recorded (Bamboo's g4dn, MIT licence), from its tenth minute on" if made.recorded else "Generated"
    lines = [SETUP.format(trace=trace), ""]
    for name, kind in KINDS.items():
        if rows := [one for one in made.found if one.figure == name]:
            title = name if name[0].isalpha() else f"Fig. {name}"
            own = [each for each in pictures if each.startswith((f"lazarus-{name}.", f"lazarus-{name}-"))]
            lines += [f"## {title}: {kind.title}", "", kind.why, "", *_table(rows)]
            lines += [*(f"![{picture}]({picture})" for picture in own), ""] if own else []
    source = "The paper: arXiv:2407.04656, §6. `aurora reproduce lazarus` writes this page."
    return page("Lazarus' evaluation, ours beside", source, lines)


def _table(rows: Sequence[LazarusFigure]) -> list[str]:
    """A row per case and a column per system or method."""
    cases, ways = (list(dict.fromkeys(getattr(one, key) for one in rows)) for key in ("case", "way"))
    cells = {(one.case, one.way): _range(one.ours) + ("" if one.paper is None else f" [{one.paper:g}]") for one in rows}
    return table(["", *ways], ([case, *(cells.get((case, way), "-") for way in ways)] for case in cases))


def as_json(made: LazarusEvaluation) -> dict[str, Any]:
    """Returns the page's numbers for JSON; a range has the keys lowest, mean and highest."""
    rows = [
        {"figure": one.figure, "case": one.case, "way": one.way, "paper": one.paper, "ours": vars(one.ours)}
        for one in made.found
    ]
    return {"schema": 1, "paper": "arXiv:2407.04656", "recorded_trace": made.recorded, "figures": rows}


def _range(found: Range) -> str:
    if found.mean is None:
        return "-"
    mean = f"{found.mean:.0f}" if found.mean >= 1000 else f"{found.mean:.3g}"
    if found.lowest is None or found.highest is None or f"{found.lowest:.3g}" == f"{found.highest:.3g}":
        return mean
    return f"{mean} ({found.lowest:.3g} to {found.highest:.3g})"
