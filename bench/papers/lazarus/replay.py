"""Training while nodes leave and join: planned replicas against checkpoint-restart and fixed-size baselines, simulated.

python -m bench.papers.lazarus.replay TRACE.csv [--nodes 10] [--minutes 80]
"""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from aurora.cli.output import terminal
from aurora.errors import AuroraError, BadInput
from aurora.reports.formatting import percent
from bench.papers.command import refuse
from bench.papers.lazarus.jobs import JOBS
from bench.papers.lazarus.membership_traces import changes, limited, load_failures, shifted
from bench.papers.lazarus.training_failures import SYSTEMS, Replay, replay

MOST_NODES, MOST_MINUTES = 1000, 1e6


def main(line: Sequence[str] | None = None) -> None:
    """Replays a trace for every training job and system, and prints a table for each job."""
    parser = ArgumentParser("python -m bench.papers.lazarus.replay", description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help=".csv of time_ms,event,node; an event is add or remove")
    parser.add_argument("--nodes", type=int, default=10, help="largest number of nodes used")
    parser.add_argument("--minutes", type=float, default=80.0, help="simulated time, from the first event on")
    given = parser.parse_args(line)
    try:
        if not 1 <= given.nodes <= MOST_NODES:
            raise BadInput(f"`nodes`: expected from one to {MOST_NODES}, found {given.nodes}")
        if not 0 < given.minutes <= MOST_MINUTES:
            raise BadInput(f"`minutes`: expected more than zero and at most {MOST_MINUTES:g}, found {given.minutes:g}")
        events = limited(shifted(changes(load_failures(given.trace))), given.nodes)
        for name, job in JOBS.items():
            runs = {label: replay(job, system, events, given.minutes * 60) for label, system in SYSTEMS.items()}
            terminal().print(replay_table(name, runs))
    except AuroraError as error:
        refuse(error)


def replay_table(title: str, runs: Mapping[str, Replay]) -> Table:
    """Returns a table of systems that trained through one trace: samples, also over the first system's, restarts, phases."""
    table = Table("", *runs, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    first = next(iter(runs.values()))
    table.add_row("samples", *(f"{run.samples:.0f}" for run in runs.values()))
    table.add_row("of the first's", *(f"{run.samples / first.samples if first.samples else 0.0:.2f}" for run in runs.values()))
    table.add_row("restarts", *(str(run.restarts) for run in runs.values()))
    for phase in first.seconds:
        table.add_row(phase, *(percent(run.seconds[phase] / (sum(run.seconds.values()) or 1.0)) for run in runs.values()))
    return table


if __name__ == "__main__":
    main()
