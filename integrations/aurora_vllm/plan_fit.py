"""Whether a plan fits the checkpoint and the ranks that vLLM is about to serve."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from aurora.errors import BadInput
from aurora.planner.check.engines import check_engine
from aurora.types import Plan
from aurora.types.profile import same_model

_ROUTER = re.compile(r"\.(\d+)\.[^.]+\.(?:gate|router|gate\.wg|router\.layer)\.weight$")


@dataclass(frozen=True)
class Checkpoint:
    """Identity of a model's routing.

    Args:
        layers: indices of the decoder layers that have experts.
        fingerprint: a hash of these layers' router weights.
    """

    layers: tuple[int, ...]
    fingerprint: str


def read_checkpoint(folder: Path, experts: int) -> Checkpoint | None:
    """Reads the routers' weights from the safetensors of a model.

    Args:
        folder: the model's folder.
        experts: number of experts per layer, which is the number of rows of a router's weight.

    Returns:
        The checkpoint's layers and fingerprint; None if no router has that many rows.
    """
    routers: dict[int, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                found = _ROUTER.search(name)
                if found and file.get_slice(name).get_shape()[:1] == [experts] and len(file.get_slice(name).get_shape()) == 2:
                    routers[int(found[1])] = file.get_tensor(name)
    if not routers:
        return None
    sha = hashlib.sha256()
    for layer in sorted(routers):
        sha.update(routers[layer].to(torch.float32).contiguous().numpy().tobytes())
    return Checkpoint(tuple(sorted(routers)), sha.hexdigest())


def experts_in(folder: Path) -> int | None:
    """Returns the number of experts per layer from the config.json in `folder`; None if it is not there."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    config = config.get("text_config", config)
    found = [config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")]
    return next((int(value) for value in found if value), None)


def check_fit(plan: Plan, checkpoint: Checkpoint, experts: int, ranks: int) -> None:
    """Checks that vLLM can serve this model by the plan.

    Args:
        plan: the plan to serve by.
        checkpoint: the model's layers and fingerprint.
        experts: the model's number of experts per layer.
        ranks: number of expert-parallel ranks that vLLM runs.

    Raises:
        BadInput: if the plan is for another model or another number of ranks.
        InfeasiblePlan: if the plan needs what vLLM cannot do.
    """
    check_engine(plan, "vllm")
    planned = plan.models[0]
    if len(plan.cluster) != ranks:
        raise BadInput(f"the plan is for {len(plan.cluster)} ranks, vLLM runs {ranks} expert-parallel ranks")
    expected, found = (len(planned.dispatch_L), planned.placement.experts), (len(checkpoint.layers), experts)
    if found != expected or not same_model(checkpoint.fingerprint, planned.fingerprint):
        raise BadInput(
            f"the plan is for {planned.model!r} with {expected[0]} MoE layers of {expected[1]} experts, the model has "
            f"{found[0]} of {found[1]}" + (" and other router weights" if found == expected else "")
        )
