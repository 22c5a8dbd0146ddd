"""aurora profile: a model and text -> a profile."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from aurora.cli import measure
from aurora.cli.common import check_output, need, terminal
from aurora.errors import BadInput
from aurora.types import CountingOptions, ProfileOptions, SyntheticOptions

DEFAULTS, SYNTHETIC = ProfileOptions(), SyntheticOptions()


def profile(
    model: Annotated[str | None, typer.Argument(help="folder of a transformers MoE model")] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 text, .jsonl chats or prompts, .npy token ids; repeat, or list several after"),
    ] = None,
    more_text: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", show_default=False)] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="what to write: profile.npz (NAME.partial.npz when interrupted), cluster.toml of --network, --devices",
        ),
    ] = None,
    sources: Annotated[int, typer.Option(help="ranks that the prompts are dealt to")] = DEFAULTS.sources,
    prompt_tokens: Annotated[int, typer.Option(help="tokens of a prompt; longer ones are cut")] = DEFAULTS.prompt_tokens,
    batch: Annotated[int, typer.Option(help="prompts that a rank decodes together")] = DEFAULTS.batch,
    max_new_tokens: Annotated[int, typer.Option(help="tokens to generate; 1 profiles prefill alone")] = DEFAULTS.max_new_tokens,
    limit: Annotated[int | None, typer.Option(help="use at most this many prompts")] = DEFAULTS.limit,
    share: Annotated[int, typer.Option(help="processes that compute here at once while phases are timed")] = DEFAULTS.share,
    token_level: Annotated[
        bool, typer.Option("--tokens", help="keep every token's choices, for plan --co-activation; larger files")
    ] = DEFAULTS.token_level,
    coactivation: Annotated[
        bool, typer.Option("--co-activation", help="count which experts are chosen together, and one layer after another")
    ] = DEFAULTS.coactivation,
    window: Annotated[
        int | None,
        typer.Option(
            help="tokens of all sources in a window; default: a forward pass is one, "
            f"with --synthetic {SYNTHETIC.window_tokens} tokens a source"
        ),
    ] = DEFAULTS.window,
    precision: Annotated[
        float | None,
        typer.Option(help="stop when the busiest rank's load is known within this part of itself, with 95 % confidence"),
    ] = DEFAULTS.precision,
    workers: Annotated[
        int | None, typer.Option(help="processes that count, some of whom may stall or die; under torchrun its ranks")
    ] = None,
    redundancy: Annotated[
        int | None, typer.Option(help="with --workers: how many of them count each part at least. Default: 2")
    ] = None,
    scheme: Annotated[
        str, typer.Option(help="with --workers: balanced, bcc, uncoded or cyclic, who counts what")
    ] = CountingOptions.scheme,
    timeout: Annotated[
        float, typer.Option(help="with --workers: seconds in which nothing comes before the run is ended")
    ] = CountingOptions.timeout_s,
    synthetic: Annotated[str | None, typer.Option(help="invent traffic: uniform or zipf:EXPONENT")] = None,
    shape: Annotated[Path | None, typer.Option(help="with --synthetic: a transformers config.json")] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="with --synthetic: a GPU kind, as NVML names it, that gets curves by its datasheet")
    ] = None,
    windows: Annotated[int, typer.Option(help="with --synthetic: windows")] = SYNTHETIC.windows,
    seed: Annotated[int, typer.Option(help="of what --synthetic, --precision and --workers draw")] = SYNTHETIC.seed,
    correlation: Annotated[
        float, typer.Option(help="with --synthetic: 0 to 1, how often the experts of a pair are chosen together")
    ] = SYNTHETIC.correlation,
    compute_only: Annotated[
        bool,
        typer.Option("--compute-only", help="time the phases alone; --output may be a profile, which gets this GPU's kind"),
    ] = False,
    curves: Annotated[
        list[Path] | None, typer.Option(help="curves that --compute-only wrote elsewhere, to join with what is written")
    ] = None,
    network: Annotated[bool, typer.Option("--network", help="measure the links between ranks: a cluster TOML")] = False,
    devices: Annotated[bool, typer.Option("--devices", help="this machine's GPUs at datasheet rates: a cluster TOML")] = False,
    ranks: Annotated[int | None, typer.Option(help="with --network: local ranks; under torchrun as many as it started")] = None,
    transport: Annotated[str, typer.Option(help="with --network: auto, gloo or nccl")] = "auto",
    vllm: Annotated[str | None, typer.Option(help="record what the vLLM server at this URL serves; no model, no text")] = None,
    record: Annotated[Path, typer.Option(help="with --vllm: a folder that its ranks and this command share")] = Path("record"),
    record_s: Annotated[float, typer.Option(help="with --vllm: for how many seconds")] = 60.0,
) -> None:
    """Count where a model's tokens go and time its phases here; or invent a profile for planning before there is traffic;
    or measure the machines.

    Ctrl-C leaves what is counted so far as a valid profile beside the output, and so does a crash, up to the last minute; the
    same command goes on from there.
    """
    from aurora.io import load_curves, load_gpus, load_json, save
    from aurora.planner.make_plan import contiguous_intervals
    from aurora.reports.tables import profile_table

    texts, joined = [*(text or []), *(more_text or [])], curves or []
    routing = bool(texts) or synthetic is not None
    if network + devices + compute_only + routing > 1 or ((network or devices) and (model is not None or joined)):
        raise BadInput("profile: expected one of a model with text, --synthetic, --compute-only, --network and --devices")
    if workers is None and (redundancy is not None or scheme != CountingOptions.scheme):
        raise BadInput("profile: --redundancy and --scheme say how --workers share the work, expected their number")
    if workers is not None and not texts:
        raise BadInput("profile --workers: expected a model with text, which they count")
    if network or devices:
        target = output or Path("cluster.toml")
        check_output(target, inputs=[])
        measure.network(ranks, transport, target) if network else measure.devices(target)
        return
    if vllm is not None and (routing or compute_only or joined or model is not None):
        raise BadInput("profile --vllm: expected no model, text, --synthetic or --compute-only")
    output = output or Path("profile.npz")
    check_output(output, inputs=[*texts, *joined, *([shape] if shape else [])])
    partial = output.with_suffix(".partial.npz")
    options = ProfileOptions(
        sources, prompt_tokens, batch, max_new_tokens, limit, share, token_level, window, coactivation, precision, seed
    )
    if compute_only or (joined and model is None and not routing):
        measure.compute(model, joined, output, options)
        return
    if vllm is not None:
        from aurora.profiler.vllm_server import profile_vllm_server

        made = profile_vllm_server(vllm, record, record_s)
    elif synthetic is not None:
        from aurora.planner.workload.synthetic import synthetic_profile

        if shape is None or model is not None or texts:
            raise BadInput("profile --synthetic: expected --shape CONFIG.json, no model and no text")
        if coactivation or precision is not None:
            raise BadInput("profile --synthetic: expected neither --co-activation nor --precision, which count a model's text")
        each = SYNTHETIC.window_tokens if window is None else _each(window, sources)
        invented = SyntheticOptions(sources, each, windows, seed, token_level, correlation)
        known = load_gpus()
        if unknown := [kind for kind in gpu or [] if kind not in known]:
            raise BadInput(f"--gpu: expected one of {', '.join(known)}, found {unknown[0]!r}")
        made = synthetic_profile(synthetic, load_json(shape), invented, [known[kind] for kind in gpu or []])
    else:
        if model is None:
            raise BadInput("profile: expected a model folder, or --synthetic with --shape")
        need("torch", "transformers")
        from aurora.cli.progress import shown, workers_shown
        from aurora.profiler.profile_model import profile_model, profile_with_workers
        from aurora.runtime.distributed.process_groups import rank_info_from_environment

        try:
            if workers is None:
                with shown() as progress:
                    made = profile_model(model, texts, options, progress, partial)
            else:
                counting = CountingOptions(workers, redundancy, scheme, seed, timeout)
                with workers_shown() as watch:
                    rank_info = rank_info_from_environment(timeout)
                    made = profile_with_workers(model, texts, options, counting, watch=watch, rank_info=rank_info)
        except KeyboardInterrupt as stop:
            print(f"aurora: interrupted: {str(stop) or 'nothing is kept'}", file=sys.stderr)
            raise typer.Exit(130) from None
    for file in joined:
        made = load_curves(file).into(made)
    save(made, output)
    if synthetic is None and workers is None and vllm is None:
        partial.unlink(missing_ok=True)
    console = terminal()
    console.print(profile_table(made, contiguous_intervals(made, seed)))
    if "precision" in made.provenance:
        console.print(made.provenance["precision"], soft_wrap=True)
    console.print(f"wrote {output}", soft_wrap=True)


def _each(window: int, sources: int) -> int:
    """A source's part of a synthetic window."""
    if window < 1 or sources < 1 or window % sources:
        raise BadInput(f"--window: expected a multiple of the {sources} sources, which hold equally much, found {window}")
    return window // sources
