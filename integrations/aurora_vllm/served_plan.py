"""The plan that a rank serves by: whether it fits the model and the settings, and which experts and orders it gives."""

import hashlib

from aurora.errors import AuroraError, BadInput
from aurora.io import load_plan
from aurora.types import Cluster, Order, Plan
from aurora_vllm.plan_fit import Checkpoint, check_fit
from aurora_vllm.settings import Settings


class ServedPlan:
    """The plan and the all-to-all's order of one expert-parallel rank; without a plan, vLLM's placement.

    Args:
        settings: give the plan's file and the order.
        rank: this expert-parallel rank.
        ranks: number of expert-parallel ranks.
        checkpoint: identity of the model that will be loaded; None if it cannot be read beforehand, so that no plan fits.
        experts: the model's number of experts per layer; None if unknown.
    """

    def __init__(self, settings: Settings, rank: int, ranks: int, checkpoint: Checkpoint | None, experts: int | None) -> None:
        self.plan: Plan | None = None
        self.order = settings.order
        self.checkpoint = checkpoint
        self._settings, self._rank, self._ranks, self._experts = settings, rank, ranks, experts

    def load(self) -> str | None:
        """Reads the plan's file. Returns the refusal reason if the plan is unreadable or does not fit; else None."""
        if self._settings.plan is None:
            return None
        try:
            plan = load_plan(self._settings.plan)
            if self.checkpoint is None or self._experts is None:
                raise BadInput("the plan cannot be compared with the model: expected a folder with config.json and safetensors")
            check_fit(plan, self.checkpoint, self._experts, self._ranks)
        except AuroraError as error:
            return str(error)
        self.plan = plan
        return None

    def disable(self) -> None:
        """Leaves placement and all-to-all to vLLM."""
        self.plan, self.order = None, "stock"

    @property
    def fingerprint(self) -> str:
        """Hash of what must be equal on all ranks: placement, orders, and the settings that hold for all of them."""
        models = [] if self.plan is None else [(m.profile_digest, m.placement.slots_LG) for m in self.plan.models]
        orders = [] if self.plan is None else [[order.pairs_X2.tolist() for order in self.plan.models[0].dispatch_L]]
        shared = (self._settings.order, self._settings.colocate, models, orders)
        return hashlib.sha256(repr(shared).encode()).hexdigest()

    @property
    def cluster(self) -> Cluster | None:
        """The plan's cluster; None without a plan."""
        return None if self.plan is None else self.plan.cluster

    def moe_layer(self, decoder_layer: int) -> int | None:
        """Returns the MoE layer's index of a decoder layer; None if it is not in the checkpoint, as draft layers are not."""
        if self.checkpoint is None:
            return decoder_layer
        layers = self.checkpoint.layers
        return layers.index(decoder_layer) if decoder_layer in layers else None

    def local_experts(self, layer: int | None) -> tuple[int, ...] | None:
        """Returns this rank's experts in a MoE layer, ascending; None if vLLM places them, as it does if there are replicas."""
        if self.plan is None or layer is None or self.plan.models[0].placement.split_LG is not None:
            return None
        return self.plan.models[0].placement.slots_LG[layer][self._rank]

    def planned_orders(self, layer: int) -> tuple[Order, Order] | None:
        """Returns the planned (dispatch, combine) orders of a MoE layer; None if orders are made for every batch."""
        if self.plan is None or self.order != "plan":
            return None
        model = self.plan.models[0]
        return model.dispatch_L[layer], model.combine_L[layer]
