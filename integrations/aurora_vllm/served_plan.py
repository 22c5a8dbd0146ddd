"""The plan that a rank uses: checks that it fits model and settings, and looks up the rank's experts and orders."""

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from aurora.algorithms.check.fit import check_engine
from aurora.algorithms.gpu_slots import filled, redundant_experts
from aurora.algorithms.workload.model_structure import decoder_layers, expert_count
from aurora.errors import AuroraError, BadInput
from aurora.io import load_model_config, load_plan, load_profile
from aurora.models.hub import ROUTER, model_folder, router_fingerprint
from aurora.types import Cluster, Hierarchy, Order, Plan, Profile
from aurora.types.arrays import IntArray
from aurora_vllm.settings import Settings

ALLTOALLS = {
    "plan": "in the plan's order", "online": "in an order made for each batch", "push": "by push", "stock": "by vLLM",
}  # fmt: skip
# Parts of names that stand beside the decoder layers or inside their experts.
_BESIDE = re.compile(r"(^|\.)(\w*mtp\w*|nextn\w*|eagle\w*|vis\w+|audio\w*|experts)\.")


@dataclass(frozen=True)
class Checkpoint:
    """Identity of a model's routers, compared with a plan's model: MoE layers and fingerprint of the router weights."""

    layers: tuple[int, ...]  # indices of the decoder layers that have experts
    fingerprint: str  # of these layers' router weights, as `router_fingerprint` makes it


def read_model(name: str, revision: str | None = None) -> tuple[Checkpoint | None, int | None]:
    """Returns (Checkpoint of a model, number of experts per layer); None in place of a value that cannot be read.

    Args:
        name: the model's folder, or its name in the local Hugging Face cache.
        revision: branch, tag or commit of a cached model; None: the main branch.
    """
    try:
        folder = model_folder(name, revision)
        experts = expert_count(load_model_config(folder))
        return read_checkpoint(folder, experts), experts
    except BadInput:
        return None, None


def read_checkpoint(folder: Path, experts: int) -> Checkpoint | None:
    """Returns the Checkpoint of the router weights in a model folder's safetensors; None if no router has `experts` rows.

    Multi-token-prediction layers are not read.

    Raises:
        BadInput: if config.json is missing or lacks the number of layers or a fitting block size, or a file has no weights.
    """
    config = load_model_config(folder)
    decoders = decoder_layers(config)
    file_of = {name: file for file in map(_open, sorted(folder.glob("*.safetensors"))) for name in sorted(file.keys())}
    routers: dict[int, tuple[int, str]] = {}
    for name, file in file_of.items():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if layer is None or not ROUTER.search(name) or _BESIDE.search(name) or layer >= decoders:
            continue
        shape = file.get_slice(name).get_shape()
        # One that also weighs shared experts has more rows than experts.
        if len(shape) == 2 and shape[0] >= experts and (layer not in routers or shape[0] < routers[layer][0]):
            routers[layer] = shape[0], name
    if not routers:
        return None

    def weight(name: str) -> torch.Tensor:
        scale = f"{name}_scale_inv"  # in any of the files
        scales = file_of[scale].get_tensor(scale) if scale in file_of else None
        return _float32(file_of[name].get_tensor(name), scales, config)

    layers = tuple(sorted(routers))
    return Checkpoint(layers, router_fingerprint(weight(routers[layer][1]) for layer in layers))


def _open(path: Path) -> Any:
    """An open file of safetensors. Raises BadInput if it is none."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path}: expected weights in safetensors, found none: {error}") from None


def _float32(weight: torch.Tensor, scale: torch.Tensor | None, config: Mapping[str, Any]) -> torch.Tensor:
    """A weight as float32; each block of a block-quantised one is multiplied by its entry in `scale`. Raises BadInput."""
    if scale is None:
        return weight.to(torch.float32)
    quantised = config.get("quantization_config")
    block = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
    size = weight.shape
    match block or (128, 128):
        case (int(rows), int(columns)) if rows > 0 < columns and scale.shape == (-(-size[0] // rows), -(-size[1] // columns)):
            whole = scale.to(torch.float32).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            return weight.to(torch.float32) * whole[: size[0], : size[1]]
    blocks = tuple(scale.shape)
    raise BadInput(
        f"config.json, weight_block_size: expected the sides of {blocks} blocks of a {tuple(size)} gate, found {block}"
    )


def check_fit(plan: Plan, checkpoint: Checkpoint, experts: int, ranks: int) -> None:
    """Checks that vLLM can serve this model with the plan.

    Args:
        plan: the plan.
        checkpoint: the model's layers and fingerprint.
        experts: the model's number of experts per layer.
        ranks: number of expert-parallel ranks that vLLM runs.

    Raises:
        BadInput: if the plan is for another model or another number of ranks.
        InfeasiblePlan: if the plan needs something that vLLM does not support.
    """
    check_engine(plan, "vllm")
    if len(plan.cluster) != ranks:
        raise BadInput(f"the plan is for {len(plan.cluster)} ranks, vLLM runs {ranks} expert-parallel ranks")
    plan.models[0].identity.check_routing(len(checkpoint.layers), experts, checkpoint.fingerprint, "the model")


def served_hierarchy(plan: Plan, settings: Settings) -> Hierarchy | None:
    """Returns the hierarchy if all-to-alls are hierarchical; None if they are flat or vLLM's own.

    Raises:
        BadInput: if the settings request hierarchical all-to-alls, and the plan's cluster has no servers.
    """
    if settings.order in ("stock", "push") or settings.all_to_all == "flat":
        return None
    planned, servers = plan.models[0].hierarchy, plan.cluster.servers
    if planned is not None or settings.all_to_all == "auto":
        return planned
    if servers is None or len(set(servers.server_G)) < 2:
        raise BadInput("all_to_all: expected a plan for a cluster with a [fabric] of several servers, found none")
    return Hierarchy(np.array(servers.server_G))


class ServedPlan:
    """Plan and order of all-to-alls that one expert-parallel rank uses; without a plan, vLLM's own placement.

    Args:
        settings: the plugin's settings, with the plan's file and the order.
        rank, ranks: this expert-parallel rank, and the number of ranks.
        checkpoint: identity of the model that will be loaded; None if it cannot be read before loading: no plan is accepted.
        experts: the model's number of experts per layer; None if unknown.

    Attributes:
        plan: the plan; None if there is none or it is refused.
        physical_LP: (L, P) int64, the planned expert of each of EPLB's physical experts (slots), rank by rank; None: the plan's
            experts are placed without EPLB, or there is no plan.
        hierarchy: the servers and chunks of hierarchical all-to-alls; None if all-to-alls are flat.
        order: the setting `order`; but "online" if the plan's orders are for flat all-to-alls and the settings request
            hierarchical ones, or vice versa.
        checkpoint: as given.
    """

    def __init__(self, settings: Settings, rank: int, ranks: int, checkpoint: Checkpoint | None, experts: int | None) -> None:
        self.plan: Plan | None = None
        self.physical_LP: IntArray | None = None
        self.hierarchy: Hierarchy | None = None
        self.order = settings.order
        self.disabled = False
        self.checkpoint = checkpoint
        self._settings, self._rank, self._ranks, self._experts = settings, rank, ranks, experts

    def load(self) -> str | None:
        """Reads the plan's file. Returns the reason for refusing it (unreadable, or does not fit); None if accepted."""
        if self._settings.plan is None:
            return None
        try:
            plan = load_plan(self._settings.plan)
            if self.checkpoint is None or self._experts is None:
                raise BadInput(
                    "the plan cannot be compared with the model: expected config.json and safetensors in its folder, or in the "
                    "local Hugging Face cache"
                )
            check_fit(plan, self.checkpoint, self._experts, self._ranks)
            self.hierarchy = served_hierarchy(plan, self._settings)
            other_way = (self.hierarchy is None) != (plan.models[0].hierarchy is None)
            if other_way and self.order == "plan":
                self.order = "online"  # the planned order is for another way over the network
        except AuroraError as error:
            return str(error)
        self.plan = plan
        return None

    def place_physical_experts(self, redundant: int) -> str | None:
        """Assigns the plan's experts to EPLB's physical experts (slots), and fills remaining slots with further replicas.

        Args:
            redundant: vLLM's configured number of physical experts of a layer minus its experts.

        Returns:
            The reason for refusing the plan if this number does not fit; else None.
        """
        assert self.plan is not None
        model = self.plan.models[0]
        slots, rest = divmod(model.placement.experts + redundant, self._ranks)
        needed = redundant_experts(model.placement)
        if redundant < needed or rest or slots > model.placement.experts:
            return f"the plan needs --eplb-config.num_redundant_experts {needed}, found {redundant}"
        slots_LG = filled(model.placement, model.load_LE, self.plan.cluster.equal, slots)
        self.physical_LP = np.array(slots_LG, dtype=np.int64).reshape(len(slots_LG), -1)
        return None

    def disable(self) -> None:
        """Switches placement and all-to-all back to vLLM's own."""
        self.plan, self.physical_LP, self.disabled = None, None, True
        self.use_stock_alltoall()

    def use_stock_alltoall(self) -> None:
        """Switches the all-to-all, but not the placement, back to vLLM's own."""
        self.hierarchy, self.order = None, "stock"

    def change_ranks(self, rank: int, ranks: int) -> None:
        """Drops the plan after a change of ranks, because it is for other ranks.

        All-to-alls are flat from now on: vLLM's own if they were so before, else in an order that is computed for each batch.
        """
        self.plan, self.hierarchy, self._rank, self._ranks = None, None, rank, ranks
        self.order = "stock" if self.order == "stock" else "online"

    @property
    def fingerprint(self) -> str:
        """Hash of placement, orders and settings; must be equal on all ranks."""
        models = [] if self.plan is None else [(m.profile_digest, m.placement.slots_LG) for m in self.plan.models]
        orders = [] if self.plan is None else [[order.pairs_X2.tolist() for order in self.plan.models[0].dispatch_L]]
        physical = [] if self.physical_LP is None else self.physical_LP.tolist()
        ways = self.hierarchy
        servers = [] if ways is None else [ways.chunks, ways.level_from, ways.server_G.tolist()]
        settings = self._settings
        control = (settings.adapt, settings.loss, settings.dry_run)
        shared = (settings.order, models, orders, physical, servers, control)
        return hashlib.sha256(repr(shared).encode()).hexdigest()

    def summary(self) -> str:
        """Returns text for the log: how experts are placed, how all-to-alls are ordered, and where records are written."""
        settings = self._settings
        experts = "vLLM places the experts"
        if self.plan is not None and settings.plan is not None:
            days = (time.time() - settings.plan.stat().st_mtime) / 86400
            way = "by expert maps" if self.physical_LP is None else "through EPLB"
            experts = f"{settings.plan}, written {days:.1f} days ago, places the experts {way}"
        if settings.adapt and not self.disabled:
            experts += ", the log says how they would follow the traffic" if settings.dry_run else ", they follow the traffic"
        record = "no record"
        if settings.record is not None:
            record = f"a record in {settings.record} every {settings.record_every_s:g} s"
        hops = "" if self.hierarchy is None else f" and in two hops over {self.hierarchy.servers} servers"
        return f"{experts}, all-to-alls {ALLTOALLS[self.order]}{hops}, {record}"

    @property
    def cluster(self) -> Cluster | None:
        """The plan's cluster; None without a plan."""
        return None if self.plan is None else self.plan.cluster

    @property
    def profile(self) -> Profile | None:
        """The profile from which the plan was made; None without a plan, or if the profile's file is missing or has changed."""
        return None if self.plan is None or self._settings.plan is None else planned_profile(self.plan, self._settings.plan)

    def moe_layer(self, decoder_layer: int) -> int | None:
        """Returns a decoder layer's index among the MoE layers; None if it is not one of the checkpoint's (a draft layer)."""
        if self.checkpoint is None:
            return decoder_layer
        layers = self.checkpoint.layers
        return layers.index(decoder_layer) if decoder_layer in layers else None

    def physical_experts(self, layer: int | None) -> IntArray | None:
        """Returns (P,) int64, the planned expert of each physical expert of a MoE layer; None where `physical_LP` is None."""
        return None if self.physical_LP is None or layer is None else self.physical_LP[layer]

    def local_experts(self, layer: int | None) -> tuple[int, ...] | None:
        """Returns this rank's experts in a MoE layer, ascending; None if vLLM or EPLB places them."""
        if self.plan is None or layer is None or self.physical_LP is not None:
            return None
        return self.plan.models[0].placement.slots_LG[layer][self._rank]

    def planned_orders(self, layer: int) -> tuple[Order, Order] | None:
        """Returns the planned orders (dispatch, combine) of a MoE layer; None if orders are computed for every batch."""
        if self.plan is None or self.order not in ("plan", "push"):
            return None
        model = self.plan.models[0]
        return model.dispatch_L[layer], model.combine_L[layer]


def planned_profile(plan: Plan, path: Path) -> Profile | None:
    """Returns the profile from which a plan was made; None if the profile's file is missing or has changed since.

    Args:
        plan: a plan of one model.
        path: the plan's file; the plan names its profile relative to it.
    """
    model = plan.models[0]
    if not model.profile_path:
        return None
    try:
        profile = load_profile(path.parent / model.profile_path)
    except AuroraError:
        return None
    return profile if model.made_from(profile) else None
