"""Push transport: tensors whose sizes both ends know, over ordered push, to compare it with other transports at all sizes.

Tensors are copied into and out of the buffers. Large ones take several rounds, as many for all ranks and all exchanges.
"""

import time
from collections.abc import Callable, Sequence

import torch

from aurora.moe.push_triton import Rows
from aurora.moe.transport import Observe, row_slices
from aurora.runtime.transports.push import LANES, OrderedPush, stage_table
from aurora.runtime.transports.symmetric_memory import SymmetricMemory
from aurora.types import Order

PIECE_BYTES = 16 * 1024  # rows in which tensors are cut
MOST_TABLES = 64  # of orders that are kept


class PushTransport:
    """A Transport by ordered push.

    Args:
        make_memory, ranks, lanes, stages, timeout_s: as of OrderedPush.
        most_bytes: most bytes of a tensor.
        round_bytes: most bytes of a tensor that are exchanged at once; None: all.
        gated: whether receivers permit senders, where an order has one partner at a time.
    """

    has_collective = False

    def __init__(
        self,
        make_memory: Callable[[int], SymmetricMemory],
        ranks: int,
        most_bytes: int,
        round_bytes: int | None = None,
        gated: bool = False,
        lanes: int = LANES,
        stages: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        pieces, a_round = (max(-(-size // PIECE_BYTES), 1) for size in (most_bytes, round_bytes or most_bytes))
        self._push = OrderedPush(make_memory, ranks, pieces, PIECE_BYTES, a_round, 1, 1, lanes, stages, timeout_s)
        self.rank, self.ranks, self.in_stages = self._push.rank, ranks, gated
        self._most_bytes, self._round_bytes = most_bytes, self._push.slots * PIECE_BYTES
        self._tables: dict[int, tuple[Order, torch.Tensor]] = {}

    def wait(self) -> None:
        """Waits until this rank's transfers are done; see `Transport.wait`."""
        self._push.check_peers()

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Gathers every rank's small tensor; see `Transport.gather`."""
        mine = row.contiguous().view(-1).to(self._push.memory.local.device)
        rows = [torch.empty_like(mine) for _ in range(self.ranks)]
        self.exchange(Order.all_at_once(self.ranks), [mine] * self.ranks, rows, lambda *_: None)
        self.wait()
        rows[self.rank].copy_(mine)
        return torch.stack(rows).view(self.ranks, *row.shape).cpu()

    def exchange(self, order: Order, sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], observe: Observe) -> None:
        """Performs one all-to-all in `order`; see `Transport.exchange`. The times of a transfer are those of the exchange."""
        row_slices(order, self.rank, sends, True)  # which says what the order leaves out
        outs, intos = ([tensor.view(-1).view(torch.uint8) for tensor in tensors] for tensors in (sends, recvs))
        for tensors in (outs, intos):
            tensors[self.rank] = tensors[self.rank][:0]
        largest = max(len(each) for each in (*outs, *intos))
        assert largest <= self._most_bytes, f"expected at most {self._most_bytes} bytes, found {largest}"
        began_s = time.perf_counter()
        for begin in range(0, self._most_bytes, self._round_bytes):
            part = slice(begin, begin + self._round_bytes)
            self._exchange_round(order, [out[part] for out in outs], [into[part] for into in intos])
        if not self._push.memory.local.is_cuda:
            self.wait()
        ended_s = time.perf_counter()
        for sent, tensors in ((True, outs), (False, intos)):
            for peer, tensor in enumerate(tensors):
                if len(tensor):
                    observe(peer, sent, len(tensor), began_s, ended_s)

    def _exchange_round(self, order: Order, outs: Sequence[torch.Tensor], intos: Sequence[torch.Tensor]) -> None:
        push = self._push
        packed = push.memory.local.new_empty(self.ranks, push.slots * PIECE_BYTES)
        for peer, out in enumerate(outs):
            packed[peer, : len(out)].copy_(out)
        pieces_R = torch.tensor([-(-len(out) // PIECE_BYTES) for out in outs], dtype=torch.int32)
        rows = Rows(packed.view(-1, PIECE_BYTES), 1, None, 1, 0, PIECE_BYTES)
        arrived, _ = push.exchange(self._table(order), rows, push.same_RX, pieces_R.to(packed.device)[:, None])
        for peer, into in enumerate(intos):
            into.copy_(arrived.view(self.ranks, -1)[peer, : len(into)])

    def _table(self, order: Order) -> torch.Tensor:
        """The order's table on the device, kept for the next call."""
        if id(order) not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            peers = self._push.peers
            table = stage_table(order, self.rank, peers.lanes, peers.stages, self.in_stages and order.one_to_one)
            self._tables[id(order)] = order, torch.from_numpy(table).to(self._push.memory.local.device)
        return self._tables[id(order)][1]
