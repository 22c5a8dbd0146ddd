"""Collectives of a served model's step: what a rank sends by links and NICs, and the seconds that it takes."""

from dataclasses import dataclass, replace
from math import ceil

from aurora.advisor.engines.engine import Layout
from aurora.advisor.engines.exchanges import EngineExchange
from aurora.advisor.served_sizes import HALF_BYTES, ServedSizes
from aurora.advisor.step_constants import StepConstants
from aurora.types import GpuKind


def all_reduce_bytes(message_bytes: float, ranks: int) -> float:
    """Returns bytes that a rank sends in an all-reduce: a reduce-scatter and an allgather.

    Args:
        message_bytes: bytes of the reduced array.
        ranks: number of ranks.

    Source: Patarasuk and Yuan, JPDC 69(2), 2009.
    """
    return 2 * (ranks - 1) / ranks * message_bytes


@dataclass(frozen=True)
class Collectives:
    """Collectives that are alike.

    Attributes:
        many: how many.
        ranks: among how many.
        sent_bytes: that a rank sends or gets in one.
        nic_bytes: that each GPU's NIC carries each way.
        arrays: that one call of the library carries.
        algorithm: "all-reduce": of NCCL or the engine; "ring": NCCL's rings, in which bytes pass through all ranks in turn;
            "direct": kernels that send each row to where it goes.
    """

    many: int
    ranks: int
    sent_bytes: float
    nic_bytes: float
    algorithm: str
    arrays: int = 1

    def seconds(self, constants: StepConstants, kind: GpuKind, nic_Bps: float | None, per_server: int) -> float:
        """Seconds of all: until the first byte, and of bytes over links and, where ranks are on several servers, over NICs.

        An all-reduce goes up and down a tree of servers. NCCL sends small messages by another protocol than large ones.
        """
        inside_s = constants.collective_s + constants.collective_rank_s * min(self.ranks, per_server)
        first_s = constants.reduce_s if self.algorithm == "all-reduce" else inside_s
        link_s, nic_s = self.sent_bytes / kind.port_Bps, 0.0
        if self.ranks > per_server and nic_Bps is not None:
            first_s += 2 * inside_s if self.algorithm == "all-reduce" else inside_s
            first_s += constants.collective_rank_s * (self.ranks - per_server) if self.algorithm == "ring" else 0.0
            nic_s = self.nic_bytes / nic_Bps
        bytes_s = max(link_s / constants.link_share, nic_s / constants.nic_share)
        if self.algorithm != "direct":
            bytes_s = min(max(link_s, nic_s) / constants.small_share, constants.large_s + bytes_s)
        return self.many * (first_s + bytes_s)


def ring_nic_bytes(ring_bytes: float, ranks: int, per_server: int) -> float:
    """Returns the bytes that each GPU's NIC carries each way in a collective over rings, as NCCL runs it between servers.

    A ring enters and leaves each server once, and carries there what each of its ranks sends. NCCL runs a ring for each NIC and
    divides the bytes among them. The server with the fewest ranks has the fewest NICs.

    Args:
        ring_bytes: bytes that a rank sends, over all rings.
        ranks: number of ranks.
        per_server: GPUs of a server, each with a NIC or an equal share of one.

    Source: Hu et al., "Demystifying NCCL", arXiv:2507.04786; NCCL's src/graph/search.cc.

    Example:
        >>> ring_nic_bytes(15.0, 16, 8)
        1.875
    """
    servers = ceil(ranks / per_server)
    return 0.0 if servers == 1 else ring_bytes / (ranks - (servers - 1) * per_server)


def stage_transfers(sizes: ServedSizes, layout: Layout, tokens: int, per_server: int) -> list[Collectives]:
    """Returns the transfers of a step's activations from each pipeline stage to the next.

    A GPU sends its part of hidden states and residuals to its peer in the next stage, whose GPUs then gather them.

    Args:
        sizes: the model's sizes.
        layout: the layout.
        tokens: tokens of a data-parallel rank in the step.
        per_server: GPUs of a server.

    Source: vLLM's distributed/parallel_state.py (send_tensor_dict with an all_gather_group).
    """
    many = layout.pipeline - 1
    between = many if layout.stage_gpus >= per_server else min(many, ceil(layout.copy_gpus / per_server) - 1)
    sent_bytes = 2 * tokens * sizes.hidden * HALF_BYTES / layout.tensor
    gather = Collectives(many, layout.tensor, (layout.tensor - 1) * sent_bytes, 0.0, "ring", arrays=2)
    calls = (many - between, 2, 0.0), (between, layout.copy_gpus, sent_bytes)
    sends = [Collectives(count, ranks, sent_bytes, nic_bytes, "direct", 2) for count, ranks, nic_bytes in calls if count]
    return [*sends, *([gather] if many and layout.tensor > 1 else [])]


def _visited(groups: int, top_k: int) -> float:
    """Groups of equally many experts that the choices of a token fall into, on average."""
    return float(groups * (1 - (1 - 1 / groups) ** top_k))


def collectives_of(
    sizes: ServedSizes, layout: Layout, tokens: int, sent: EngineExchange, imbalance: float, per_server: int, quantised: bool
) -> tuple[list[Collectives], list[Collectives]]:
    """Collectives of a step: of tensor parallelism; and the exchanges there and back, none without data-parallel ranks.

    Experts that are split by width get all tokens whatever the exchange. Otherwise a token goes where `once_per` says, and the
    busiest rank gets the most.
    """
    reduces: list[Collectives] = []
    routed = layout.expert > 1 and sent.sends in ("route", "balance")
    spread = (layout.data > 1 or routed) and sizes.moe_layers > 0
    if layout.tensor > 1:
        message = tokens * sizes.hidden * HALF_BYTES
        after = sizes.layers - (sizes.moe_layers if spread else 0)
        sent_bytes = all_reduce_bytes(message, layout.tensor)
        nic_bytes = ring_nic_bytes(sent_bytes, layout.tensor, per_server)
        reduces.append(Collectives(sizes.layers + after + 1, layout.tensor, sent_bytes, nic_bytes, "all-reduce"))
        if spread:  # tokens are split among tensor ranks before their experts, and gathered after
            reduces.append(Collectives(sizes.moe_layers, layout.tensor, sent_bytes / 2, nic_bytes / 2, "ring"))
    if not spread:
        return reduces, []
    token_bytes, ranks = sizes.dispatched * HALF_BYTES, layout.stage_gpus
    there_bytes = sizes.dispatched * sizes.row_bytes if quantised else token_bytes
    if not routed:  # all tokens go to all ranks with their choices, and back reduced
        sent_bytes = (layout.data - 1) * tokens * token_bytes
        nic_bytes = ring_nic_bytes((ranks - 1) * tokens / layout.tensor * token_bytes, ranks, per_server)
        part = (there_bytes + 8 * sizes.top_k) / token_bytes  # with a token's choices and their weights
        back = Collectives(sizes.moe_layers, ranks, sent_bytes, nic_bytes, "ring")
        return reduces, [replace(back, sent_bytes=sent_bytes * part, nic_bytes=nic_bytes * part, arrays=3), back]
    servers, choices = ceil(ranks / per_server), sizes.top_k if sent.once_per == "expert" else _visited(ranks, sizes.top_k)
    crossing = {"server": _visited(servers, sizes.top_k), "servers": servers}.get(sent.once_per, choices)
    rank_bytes = tokens / layout.tensor * token_bytes * imbalance
    sent_bytes, nic_bytes = (rank_bytes * rows * (many - 1) / many for rows, many in ((choices, ranks), (crossing, servers)))
    call = Collectives(sizes.moe_layers, ranks, sent_bytes, nic_bytes, "direct")
    part = there_bytes / token_bytes
    return reduces, [replace(call, sent_bytes=sent_bytes * part, nic_bytes=nic_bytes * part, arrays=3), call]
