"""aurora recommend: a model, GPUs and an engine -> a plan, its gain, and the command that starts the engine with it."""

from pathlib import Path

from cyclopts import Parameter

import aurora
from aurora.advisor.engines import SERVING_ENGINES
from aurora.cli.inputs import check_folder, load_traffic
from aurora.cli.options import refuse_given, verb
from aurora.cli.output import progress_bars, show
from aurora.errors import BadInput
from aurora.io import load_cluster, load_gpus, load_model_config, load_requests
from aurora.io.model_configs import served_model
from aurora.types import Cluster, RequestLoad
from aurora.types.options import Seconds


@verb(engine=Parameter(help=f"the serving engine: {', '.join(SERVING_ENGINES)}; NAME==VERSION: a version of it"))
def recommend(
    *,
    engine: str,
    model: list[str] | None = None,
    gpus: str | None = None,
    cluster: Path | None = None,
    profile: list[Path] | None = None,
    load: RequestLoad = RequestLoad(),
    requests: Path | None = None,
    nic_Bps: float = 50e9,
    per_server: int | None = None,
    eplb_stall_s: Seconds | None = None,
    prefill_gpus: str | None = None,
    decode_gpus: int | None = None,
    output: Path = Path("recommended"),
    as_json: bool = False,
) -> None:
    """Recommend how to serve a model on given GPUs, with the gain over the engine's default and the launch command, if it pays.
    Without a profile, layouts and exchanges are compared over recorded models' imbalance, and no placement is recommended.

    Args:
        engine: the serving engine.
        model: the model's config.json or folder, or a shipped model's name; needed without --profile; once per model.
        gpus: kinds and numbers of GPUs, such as h20:8,a100:8; or give --cluster.
        cluster: cluster TOML, or a shipped cluster's name.
        profile: the model's recorded traffic; default: synthetic traffic; of two models: whether to split the GPUs.
        requests: a trace of requests, on which balance over data-parallel ranks is predicted.
        nic_Bps: with --gpus: rate of each GPU's NIC to other servers, bytes per second.
        per_server: with --gpus: number of GPUs in a server; default: 8, or 4 of GB200 and GB300, whose servers share NVLink.
        eplb_stall_s: seconds for which serving waits in a rearrangement of EPLB, as the engine logs them; default: computed.
        prefill_gpus: also compare disaggregated prefill: number of GPUs for prompts, or auto for the best split.
        decode_gpus: number of GPUs for answers; default: those that are left.
        output: folder for the plan and the engine's files.
    """
    from aurora.advisor.datasheet_gpus import cluster_of, with_datasheet_curves
    from aurora.advisor.engines.trtllm import OPTIONS
    from aurora.advisor.recommend import save_recommendation
    from aurora.advisor.two_models import recommend_for_two
    from aurora.reports.advice import recommendation_lines, two_models_advice
    from aurora.reports.comparisons import (
        balancing_costs,
        disaggregation_table,
        memory_table,
        recommendation_table,
        requests_table,
    )
    from aurora.reports.json_objects import fields_json, recommendation_json

    if (not gpus) == (cluster is None):
        raise BadInput("recommend: expected either --gpus or --cluster")
    if not gpus:
        refuse_given(("nic_Bps", "per_server"), "with `gpus`")
    check_folder(
        output, "cluster.toml", "profile.npz", "0.npz", "1.npz", *{use.file for use in SERVING_ENGINES.values()}, OPTIONS
    )
    machines = load_cluster(cluster) if cluster else gpus or ""
    traffic, models = [load_traffic(path) for path in profile or ()], model or []
    if max(len(models), len(traffic)) > 1 and len(models) not in (0, len(traffic)):
        raise BadInput(f"recommend: expected a --profile for each --model, found {len(traffic)} and {len(models)}")
    if len(traffic) > 1:
        refuse_given(("requests", "eplb_stall_s", "prefill_gpus", "decode_gpus"), "for one model")
        hardware = machines if isinstance(machines, Cluster) else cluster_of(machines, load_gpus(), nic_Bps, per_server)
        kinds = [kind for name, kind in load_gpus().items() if name in {gpu.kind for gpu in hardware.gpus}]
        for number, name in enumerate(models):
            traffic[number] = with_datasheet_curves(traffic[number], load_model_config(name), kinds)
        with progress_bars() as progress:
            two = recommend_for_two(hardware, engine, traffic, progress)
        command = two.save(output, [served_model(name) for name in models] or ["MODEL_A", "MODEL_B"])
        advice = two_models_advice(two)
        known = {"engine": engine, "drawn": two.drawn, "recommendation": two.way, "advice": advice, "gains": two.gains}
        wrote = [f"wrote {output}", f"start them with:\n{command}"] if command else []
        show(as_json, {**known, "output": output if command else None, "launch": command}, advice, *wrote)
        return
    recorded = None if requests is None else load_requests(requests)
    with progress_bars() as progress:
        recommendation = aurora.recommend(
            machines, engine, model=next(iter(models), None), profile=next(iter(traffic), None), load=load,
            requests=recorded, nic_Bps=nic_Bps, per_server=per_server, eplb_stall_s=eplb_stall_s,
            prefill_gpus=int(prefill_gpus) if prefill_gpus and prefill_gpus.isdecimal() else prefill_gpus,
            decode_gpus=decode_gpus,
            progress=progress,
        )  # fmt: skip
        sharing = None
        if not recommendation.drawn and recommendation.served is None:
            sharing = recommend_for_two(recommendation.cluster, engine, [recommendation.profile] * 2, progress)
    command = save_recommendation(recommendation, output, served_model(models[0]) if models else "MODEL")
    show(
        as_json,
        {
            **recommendation_json(recommendation),
            "sharing": sharing and {"advice": two_models_advice(sharing), **fields_json(sharing, "batch gains")},
            "output": output if command else None,
            "launch": command,
        },
        recommendation_table(recommendation),
        None if recommendation.disaggregation is None else disaggregation_table(recommendation.disaggregation),
        None if recommendation.requests is None else requests_table(recommendation.requests),
        None if recommendation.drawn or recommendation.served is None else balancing_costs(recommendation.served),
        None if recommendation.served is None else memory_table(recommendation.engine, recommendation.served),
        *([f"config: {said}"] if (said := recommendation.profile.provenance.get("config")) else []),
        *recommendation_lines(recommendation),
        None if sharing is None else f"A second model like it on these GPUs: {two_models_advice(sharing)}",
        *([f"wrote {output}", f"start the engine with:\n{command}"] if command else []),
    )
