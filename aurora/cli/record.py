"""aurora record: a running vLLM server -> a profile of what it serves."""

from pathlib import Path
from typing import Annotated

import typer

from aurora.cli.inputs import check_output
from aurora.cli.options import Json, Layers
from aurora.cli.profile import shown_profile
from aurora.errors import BadInput
from aurora.types.option_checks import LONGEST_S


def record(
    url: Annotated[str, typer.Argument(help="URL of the vLLM server, which runs our plugin")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the profile to write")] = Path("profile.npz"),
    folder: Annotated[Path, typer.Option(help="the folder of the server's setting `record`, as this command sees it")] = Path(
        "record"
    ),
    seconds: Annotated[float, typer.Option(help="how long to record")] = 60.0,
    layers: Layers = False,
    as_json: Json = False,
) -> None:
    """Record how a running vLLM server routes tokens, and write it as a profile."""
    from aurora.io import save
    from aurora.profiler.import_routing import profile_vllm_server

    if not 0 < seconds <= LONGEST_S:
        raise BadInput(f"`seconds`: expected more than zero and at most {LONGEST_S:g}, found {seconds}")
    check_output(output=output)
    made = profile_vllm_server(url, folder, seconds)
    save(made, output)
    shown_profile(made, output, layers, as_json)
