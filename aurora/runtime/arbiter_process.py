"""Arbiter process: grants the GPUs and ports of one machine to models that run in processes of their own, over a Unix socket.

`python -m aurora.runtime.arbiter_process FOLDER` returns once an arbiter listens in FOLDER. The arbiter ends when its
last client has left. Clients (`aurora.runtime.process_port_arbiter`), one for each rank of a model, send packets of JSON:

- ["join", GPU, model or null, interactive, name]; answer: ["joined", model], or ["refused", reason]
- ["compute", level], ["give_way", level] and ["exchange"]; answer, when it may begin: ["granted", models]
- ["late", seconds]: the turn that it waits for is to be passed on if it has lasted so long; answer then: ["passed_on", whose]
- ["computed"], ["exchanged", hold_port]: it is over

A client that dies, or sends anything else, loses what it has. Unasked, clients hear ["models", models], the number of models,
and ["urgent"] if more urgent work waits for the GPU that they have.

GPU: a `ComputeQueue` for each. Port: an all-to-all needs the ports of all its ranks, so it has them all, from the first rank
that asks to the last that ends. A model is in the sequence of `PortSlices` only while an exchange of it waits or is under way,
so nobody waits for an idle one. Its slice starts at the virtual time at which the last one to begin started, but not before its
own last one ended; the slice that ends first is next. Models that always wait take slices in the sequence that threads take.

A stopped process leaves unused what it has, until a client that waits is late.
"""

import fcntl
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aurora.algorithms.arbitration import ComputeQueue, ComputeRequest, PortSlices
from aurora.types import SlicePolicy

SOCKET, LOCK = "arbiter.sock", "arbiter.lock"
MOST_BYTES = 4096  # of a packet
KINDS = {"join", "compute", "give_way", "computed", "exchange", "exchanged", "late"}  # of packets; each has a method
FIRST_S = 60.0  # how long it waits for its first client


@dataclass(eq=False)
class Model:
    """A model, of whose exchanges `begun` have begun. It waits with the next one, and may hold the port for it."""

    number: int
    policy: SlicePolicy
    clients: "list[Client]" = field(default_factory=list)
    begun: int = 0
    waits: bool = False
    holds: bool = False
    start: float = 0.0  # virtual times of its last slice
    end: float = 0.0


@dataclass(eq=False)
class Client:
    """One rank of a model: it has a GPU, or asks for it or for the port; `done` of its exchanges are over."""

    connection: socket.socket
    model: Model | None = None
    gpu: int = 0
    name: str = ""
    request: ComputeRequest | None = None
    has_since_s: float | None = None  # since when it has the GPU
    urged: bool = False  # it knows that more urgent work waits
    asks: bool = False
    done: int = 0

    def tell(self, *packet: Any) -> None:
        """Sends a packet, which is lost if the client is dead or does not read."""
        with suppress(OSError):
            self.connection.send(json.dumps(packet).encode())


class Arbiter:
    """Grants the GPUs and the port to clients."""

    def __init__(self) -> None:
        self._queues: defaultdict[int, ComputeQueue] = defaultdict(ComputeQueue)
        self._clients: list[Client] = []
        self._models: list[Model] = []
        self._slices = PortSlices((), overlapping=True)
        self._owner: Model | None = None  # of the port
        self._owned_s = 0.0  # since when
        self._now_K = [0.0, 0.0]  # virtual time of batch and of interactive models

    def receive(self, client: Client, packet: bytes) -> None:
        """Does what a packet asks for. Raises TypeError or ValueError if the client may not send it."""
        kind, *values = json.loads(packet)
        if kind not in KINDS or (client.model is None) != (kind == "join"):
            raise ValueError
        getattr(self, f"_{kind}")(client, *values)
        self._grant()

    def leave(self, client: Client) -> None:
        """Frees what a client has, and forgets what it asks for."""
        if (model := client.model) is None:
            return
        self._computed(client)
        self._clients.remove(client)
        model.clients.remove(client)
        if model.clients:
            self._end_if_over(model, False)
        else:
            self._models.remove(model)
            self._slices.leave(model.number)
            self._owner = None if self._owner is model else self._owner
            self._tell_models()
        self._grant()

    def _join(self, client: Client, gpu: int, number: int | None, interactive: bool, name: str) -> None:
        if number is None:
            policy = SlicePolicy(bool(interactive), float("inf") if interactive else 1.0)
            self._models.append(Model(self._slices.add(policy), policy))
            number = self._models[-1].number
        model = next((model for model in self._models if model.number == number), None)
        taken = [other.name for other in self._clients if other.model is model and other.gpu == gpu]
        if model is None or taken:
            client.tell("refused", f"GPU {gpu} of model {number} is taken by {taken[0]}" if taken else f"no model {number}")
            return
        client.model, client.gpu, client.name = model, int(gpu), str(name)
        self._clients.append(client)
        model.clients.append(client)
        client.tell("joined", number)
        self._tell_models()

    def _tell_models(self) -> None:
        for client in self._clients:
            client.tell("models", len(self._models))

    def _compute(self, client: Client, level: int) -> None:
        if client.request is not None:
            raise ValueError
        client.request = self._queues[client.gpu].ask(int(level))

    def _give_way(self, client: Client, level: int) -> None:
        if client.has_since_s is None:  # its turn was passed on
            self._compute(client, level)
        else:
            client.request, client.has_since_s = self._queues[client.gpu].give_way(), None

    def _late(self, client: Client, turn_s: float) -> None:
        """Ends the turn that a client waits for, if it has lasted so long."""
        late_s = time.monotonic() - float(turn_s)
        for other in self._clients if client.request is not None else ():
            if other.gpu == client.gpu and other.has_since_s is not None and other.has_since_s < late_s:
                client.tell("passed_on", f"{other.name} has had GPU {other.gpu}")
                self._computed(other)
        if client.asks and (owner := self._owner) is not None and self._owned_s < late_s:
            behind = [other.name for other in owner.clients if other.done < owner.begun or owner.holds]
            client.tell("passed_on", f"{', '.join(behind)} has had the port")
            self._end(owner, False)

    def _computed(self, client: Client) -> None:
        queue = self._queues[client.gpu]
        if client.has_since_s is not None:
            queue.end()
        elif client.request is not None:
            queue.waiting.remove(client.request)
        client.request = client.has_since_s = None

    def _exchange(self, client: Client) -> None:
        client.asks = True

    def _exchanged(self, client: Client, hold_port: bool) -> None:
        assert client.model is not None
        if client.asks or client.done >= client.model.begun:
            raise ValueError
        client.done += 1
        self._end_if_over(client.model, bool(hold_port))

    def _end_if_over(self, model: Model, hold_port: bool) -> None:
        if self._owner is model and not model.holds and all(client.done == model.begun for client in model.clients):
            self._end(model, hold_port)

    def _end(self, model: Model, hold_port: bool) -> None:
        self._slices.end(model.number, hold_port)
        model.holds = hold_port
        if not hold_port:
            self._owner = None

    def _grant(self) -> None:
        """Begins whatever may begin."""
        for client in self._clients:
            if client.request is None:
                continue
            queue = self._queues[client.gpu]
            if queue.first is client.request:
                queue.begin(client.request)
                client.has_since_s, client.urged = time.monotonic(), False
                client.tell("granted", len(self._models))
        for client in self._clients:
            if client.has_since_s is not None and not client.urged and self._queues[client.gpu].priority_waits:
                client.urged = True
                client.tell("urgent")
        for model in self._models:
            self._ask_for_port(model)
        if (begins := self._next_exchange()) is not None:
            kind = begins.policy.interactive
            self._now_K[kind] = max(self._now_K[kind], begins.start)
            self._slices.begin(begins.number)
            begins.waits, begins.holds, begins.begun = False, False, begins.begun + 1
            self._owner, self._owned_s = begins, time.monotonic()
        for client in self._clients:
            assert client.model is not None
            if client.asks and client.done < client.model.begun:
                client.asks = False
                client.tell("granted", len(self._models))

    def _ask_for_port(self, model: Model) -> None:
        """Lets a model wait for its next slice, once a rank asks for it and all have ended the exchange before."""
        asked = any(client.asks for client in model.clients) and all(client.done == model.begun for client in model.clients)
        if not asked or model.waits:
            return
        if not model.holds:
            model.start = max(self._now_K[model.policy.interactive], model.end)
            model.end = model.start + 1
            self._slices.join(model.number, model.end, slices=1)
        model.waits = True
        self._slices.ask(model.number)

    def _next_exchange(self) -> Model | None:
        """The model whose exchange begins now: the one that the port is held for, else the one whose slice is next."""
        if self._owner is not None:
            return self._owner if self._owner.holds and self._owner.waits else None
        ready = [model for model in self._models if model.waits and self._slices.may_begin(model.number)]
        return min(ready, key=lambda model: model.policy.interactive, default=None)  # a batch model's is then overdue


def serve(listener: socket.socket) -> None:
    """Serves clients of this user until the last one has left, or none has come for FIRST_S."""
    arbiter, first_s = Arbiter(), time.monotonic() + FIRST_S
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(selector.get_map()) > 1 or time.monotonic() < first_s:
            for key, _ in selector.select(FIRST_S):
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    if peer_user(connection) == os.getuid():
                        selector.register(connection, selectors.EVENT_READ, Client(connection))
                        first_s = 0.0
                    continue
                client: Client = key.data
                try:
                    if not (packet := client.connection.recv(MOST_BYTES)):
                        raise ConnectionError
                    arbiter.receive(client, packet)
                except (OSError, TypeError, ValueError, RecursionError):
                    selector.unregister(client.connection)
                    client.connection.close()
                    arbiter.leave(client)


def peer_user(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end."""
    user: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]
    return user


def main(folder: str) -> None:
    """Begins to listen in a folder of this user's alone, and serves in the background; returns at once if another does so."""
    os.chdir(folder)  # a socket's path is short
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    with suppress(FileNotFoundError):
        os.unlink(SOCKET)  # of an arbiter that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(SOCKET)
    listener.listen()
    if os.fork():
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    try:
        serve(listener)
    finally:
        os.unlink(SOCKET)


if __name__ == "__main__":
    main(sys.argv[1])
