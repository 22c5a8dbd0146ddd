"""A GPU with NCCL groups, as members of an epoch use it, without either: real gloo groups, and NCCL's rules about lost peers.

- Grouped calls of a GPU run one after the other, and end as a whole.
- A call whose peer is lost waits for ever, until it is aborted. It ends then, without an error, and what it was to receive is
  garbage.
- Making a communicator takes all ranks. It cannot be aborted.
- A communicator that was aborted takes no call.
"""

import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch.distributed import ProcessGroupGloo
from torchft.process_group import create_store_client

FOR_EVER_S = 3600


class Killed(BaseException):
    """A member's process has died."""


def die(member):
    """Ends the connections of a member that is a thread, as its process's death would."""
    member.close()
    raise Killed


def gloo_group(store, rank, ranks):
    """Makes a gloo group on loopback."""
    options = ProcessGroupGloo._Options()
    options._timeout, options._devices = timedelta(seconds=60), [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, rank, ranks, options)


class EmulatedGpu:
    """A GPU; see `aurora.elastic.epoch_nccl.NcclGpu`.

    Args:
        on_call: called with a group's number and the number of its call, from 0, the communicator's making, before each.
        waits: whether the host waits for each call, as for all work on a CPU; if not, it must ask the timer.

    Attributes:
        groups: all that were made.
    """

    device = "cpu"

    def __init__(self, on_call=lambda group, call: None, waits=True):
        self.on_call, self.waits, self.groups = on_call, waits, []
        self._queue, self._posted, self._ended = SimpleQueue(), 0, 0
        threading.Thread(target=self._run, daemon=True).start()

    def new_group(self, store, epoch, rank, ranks, timeout_s):
        group = EmulatedGroup(self, len(self.groups), rank, ranks)
        self.groups.append(group)
        group.make(store)
        return group

    def aside(self):
        return nullcontext()

    def timer(self):
        return self

    def mark(self):
        return self._posted

    def reached(self, mark):
        return self._ended >= mark

    def seconds(self, mark):
        assert self.reached(mark), "who waits here is not freed when the epoch is over"
        return float(mark)

    def elapsed_s(self, start, end):
        return float(end - start)

    def synchronize(self):
        self.post(lambda: None).wait()

    def post(self, call):
        """Queues a function, which returns when its call has ended. Returns an event of its end."""
        ended = threading.Event()
        self._posted += 1
        self._queue.put((call, ended))
        return ended

    def _run(self):
        while True:
            call, ended = self._queue.get()
            call()
            self._ended += 1
            ended.set()


class EmulatedGroup:
    """An NCCL group of an EmulatedGpu: torchft's, and the one in it.

    Attributes:
        aborts: how many times it was aborted.
        made: whether its communicator is.
    """

    def __init__(self, gpu, number, rank, ranks):
        self._gpu, self._number, self._rank, self._ranks = gpu, number, rank, ranks
        self._aborted, self._open, self._calls = threading.Event(), None, 0
        self.aborts, self.made, self.parent = 0, False, self

    def make(self, address):
        self._gpu.on_call(self._number, 0)
        try:
            self._store = create_store_client(address, timedelta(seconds=60))
            self._gloo = gloo_group(self._store, self._rank, self._ranks)
        except RuntimeError:
            time.sleep(FOR_EVER_S)
        self.made = True

    def _start_coalescing(self, device):
        assert self._open is None, "one group in another"
        if self._aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        self._open = []

    def send(self, tensors, peer, tag):
        self._open.append((True, *tensors, peer))

    def recv(self, tensors, peer, tag):
        self._open.append((False, *tensors, peer))

    def _end_coalescing(self, device):
        ends, self._open = self._open, None
        self._calls += 1
        self._gpu.on_call(self._number, self._calls)
        return EmulatedWork(self._gpu, self._gpu.post(lambda: self._perform(ends)))

    def abort(self):
        self.aborts += 1
        self._aborted.set()

    def _perform(self, ends):
        """On the GPU: the call, in a thread that is left behind when it is aborted."""
        over, failed = threading.Event(), []

        def transfer():
            try:
                flats = [(sent, tensor.detach().view(-1).view(torch.uint8), peer) for sent, tensor, peer in ends]
                works = [(self._gloo.send if sent else self._gloo.recv)([flat], peer, 0) for sent, flat, peer in flats]
                for work in works:
                    work.wait()
                over.set()
            except RuntimeError as error:
                failed.append(error)  # NCCL would wait for ever

        threading.Thread(target=transfer, daemon=True).start()
        while not over.wait(0.001):
            if self._aborted.is_set():
                for sent, tensor, _ in ends:
                    if not sent:
                        tensor.detach().view(-1).view(torch.uint8).fill_(255)
                return


class EmulatedWork:
    """A posted call."""

    def __init__(self, gpu, ended):
        self._gpu, self._ended = gpu, ended

    def wait(self):
        """Makes the stream wait. On a CPU that is the host, which no epoch's end frees but by an abort."""
        if self._gpu.waits:
            assert self._ended.wait(FOR_EVER_S)
