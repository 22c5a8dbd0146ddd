"""aurora profile, synthetic and record: a model and text, a model's shape, or a running vLLM server -> a profile."""

from contextlib import suppress
from pathlib import Path

from cyclopts import Parameter

import aurora
from aurora.cli.inputs import check_model, check_output
from aurora.cli.options import verb
from aurora.cli.output import WORST, need_models, progress_bars, show, working
from aurora.errors import BadInput
from aurora.io import load_gpus, load_profile, save
from aurora.types import Profile, ProfileOptions, SyntheticOptions
from aurora.types.options import Seconds


@verb(text=Parameter(consume_multiple=True), seed=None, token_level=Parameter(name="--tokens"))
def profile(
    model: str,
    /,
    *,
    text: list[Path],
    output: Path = Path("profile.npz"),
    options: ProfileOptions = ProfileOptions(),
    as_json: bool = False,
) -> None:
    """Count which experts the tokens choose, and measure the times of router, experts and weighted sum on this machine.

    Ctrl-C ends the counting; the profile of what was counted until then is written, and the same command goes on from it.

    Args:
        model: folder of a transformers MoE model, or its name in the local hub cache.
        text: UTF-8 text, .jsonl chats or prompts, or .npy token ids; repeat it, or list several files.
        output: the profile to write.
    """
    check_output(output=output)
    check_model(model)
    need_models()
    begun = None
    with suppress(BadInput):  # no profile, which is written over
        begun = load_profile(output) if output.exists() else None
    if begun is not None and "interrupted" not in begun.provenance:
        begun = None
    with progress_bars() as progress:
        counted = aurora.profile(model, text, options, progress, begun)
    save(counted, output)
    shown_profile(counted, output, as_json)


@verb(gpu_kinds=Parameter(name="--gpu-kind"), correlation=None, token_level=None)
def synthetic(
    skew: str,
    shape: Path,
    /,
    *,
    output: Path = Path("profile.npz"),
    options: SyntheticOptions = SyntheticOptions(),
    gpu_kinds: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Make a synthetic profile, for planning before there is traffic. Routing is random, compute times are not measured here.

    Args:
        skew: distribution of the experts' loads: uniform or zipf:EXPONENT.
        shape: the model's config.json or folder, or the name of a shipped model.
        output: the profile to write.
        gpu_kinds: a GPU, such as h100, for compute curves from its datasheet; or a .toml file of kinds; may be repeated.
    """
    check_output(output=output)
    kinds = [kind for name in gpu_kinds or [] for kind in (load_gpus(name).values() if name.endswith(".toml") else [name])]
    with working("drawing traffic"):
        drawn = aurora.synthetic_profile(skew, shape, options, gpu_kinds=kinds)
    save(drawn, output)
    shown_profile(drawn, output, as_json)


@verb()
def record(
    url: str,
    /,
    *,
    output: Path = Path("profile.npz"),
    folder: Path = Path("record"),
    seconds: Seconds = 60.0,
    as_json: bool = False,
) -> None:
    """Record how a running vLLM server routes tokens, and write it as a profile.

    Args:
        url: URL of a vLLM server with the plugin.
        output: the profile to write.
        folder: path on this machine of the folder in the server's setting `record`.
        seconds: seconds to record.
    """
    from aurora.profiler.import_routing import profile_vllm_server

    check_output(output=output)
    with working(f"recording for {seconds:g} s"):
        recorded = profile_vllm_server(url, folder, seconds)
    save(recorded, output)
    shown_profile(recorded, output, as_json)


def shown_profile(profile: Profile, output: Path, as_json: bool) -> None:
    """Print a table or JSON object on a new profile; `output` is the file to which it was written."""
    from aurora.algorithms.workload.load_statistics import contiguous_interval
    from aurora.algorithms.workload.timing_doubts import timing_doubts
    from aurora.algorithms.workload.traffic_doubts import traffic_doubts
    from aurora.reports.json_objects import json_of
    from aurora.reports.plan_tables import profile_table

    about = profile.provenance
    remarks = [f"{key}: {about[key]}" for key in ("config", "left out", "interrupted") if key in about]
    table = profile_table(profile, contiguous_interval(profile, 0))
    doubts = (*traffic_doubts(profile), *timing_doubts(about))
    result = {"output": output, **json_of(profile), "kinds": list(profile.curves), "layers": table.objects(), "doubts": doubts}
    show(as_json, result, table.worst(WORST, lambda row: row[2]), about.get("precision"), *remarks, *doubts, f"wrote {output}")
