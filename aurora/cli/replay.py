"""aurora replay: a trace of nodes that join and leave -> how much several training systems get done."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.subcommand import Json, show
from aurora.errors import BadInput

MOST_NODES, MOST_MINUTES = 1000, 1e6


def replay(
    trace: Annotated[Path, typer.Argument(help=".csv of time_ms,event,node; an event is add or remove")],
    nodes: Annotated[int, typer.Option(help="largest number of nodes used")] = 10,
    minutes: Annotated[float, typer.Option(help="simulated time, from the first event on")] = 80.0,
    as_json: Json = False,
) -> None:
    """Simulate training while nodes join and leave: planned replicas against checkpoint-restart and fixed-size baselines."""
    from aurora.io import load_failures
    from aurora.reports.trace_tables import replay_table
    from aurora.reproduce.lazarus.jobs import JOBS
    from aurora.simulator.membership_traces import changes, limited, shifted
    from aurora.simulator.training_failures import SYSTEMS
    from aurora.simulator.training_failures import replay as replayed

    if not 1 <= nodes <= MOST_NODES:
        raise BadInput(f"`nodes`: expected from one to {MOST_NODES}, found {nodes}")
    if not 0 < minutes <= MOST_MINUTES:
        raise BadInput(f"`minutes`: expected more than zero and at most {MOST_MINUTES:g}, found {minutes:g}")
    events = limited(shifted(changes(load_failures(trace))), nodes)
    runs = {
        name: {system: replayed(job, how, events, minutes * 60) for system, how in SYSTEMS.items()}
        for name, job in JOBS.items()
    }
    jobs = {
        name: {system: {"samples": r.samples, "restarts": r.restarts, "seconds": r.seconds} for system, r in each.items()}
        for name, each in runs.items()
    }
    tables = [
        replay_table(name, {system: (run.samples, run.restarts, run.seconds) for system, run in each.items()})
        for name, each in runs.items()
    ]
    show(as_json, {"jobs": jobs}, *tables)
