"""Descriptions of serving engines: their layouts of a model over GPUs, their exchanges of tokens, and their launch commands."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from aurora.advisor.engines.exchanges import EXCHANGES, LOW_LATENCY
from aurora.errors import BadInput, check_one_of

PLACEMENTS = {
    "linear": "experts in sequence, equally many on each GPU",
    "plan": "as aurora's plan has them",
}
BALANCES = {
    "": "an expert's replicas take turns, or one is drawn",
    "lplb": "a linear program divides each batch over replicas",
}


@dataclass(frozen=True)
class Layout:
    """Division of a model over GPUs: tensor, data, expert and pipeline parallelism, and number of copies.

    Attributes:
        tensor: number of GPUs over which attention is cut (tensor parallelism).
        data: number of data-parallel ranks, which hold all of attention, serve separate requests and share experts.
        expert: number of GPUs over which whole experts are divided (expert parallelism); 1: each expert is cut over all GPUs of
            a stage.
        copies: number of independent engines, each with the whole model.
        pipeline: number of stages, each with a part of the layers on GPUs of its own (pipeline parallelism).

    Raises:
        BadInput: if a size is below 1, or `expert` does not divide a stage's GPUs.

    Example:
        >>> Layout(data=8, expert=8, copies=2).gpus
        16
    """

    tensor: int = 1
    data: int = 1
    expert: int = 1
    copies: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if type(size) is not int or size < 1:
                raise BadInput(f"`{name}` of a layout: expected a whole number from 1 on, found {size!r}")
        if self.stage_gpus % self.expert:
            raise BadInput(f"`expert` of a layout: expected a divisor of a copy's {self.stage_gpus} GPUs, found {self.expert}")

    @property
    def stage_gpus(self) -> int:
        """Number of GPUs that compute a layer together: of a stage, or without stages of a copy."""
        return self.tensor * self.data

    @property
    def copy_gpus(self) -> int:
        """Number of GPUs of one copy (an independent engine with the whole model)."""
        return self.stage_gpus * self.pipeline

    @property
    def gpus(self) -> int:
        """Number of GPUs of all copies together."""
        return self.copy_gpus * self.copies

    def __str__(self) -> str:
        """Returns the layout in words, such as "2 copies, each TP 2 DP 4 EP 8"."""
        copies = f"{self.copies} copies, each " if self.copies > 1 else ""
        sizes = (("TP", self.tensor), ("DP", self.data), ("EP", self.expert), ("PP", self.pipeline))
        return f"{copies}{' '.join(f'{kind} {size}' for kind, size in sizes if size > 1) or 'on one GPU'}"


def staged_layouts(gpus: int, per_server: int) -> list[Layout]:
    """Returns layouts with pipeline parallelism: on several servers a server each stage, on one a part of it.

    Activations alone travel between stages, so that slow NICs carry neither all-reduces nor exchanges of experts.

    Args:
        gpus: number of GPUs.
        per_server: GPUs of a server.

    Example:
        >>> [str(layout) for layout in staged_layouts(16, 8)]
        ['TP 8 PP 2', 'TP 8 EP 8 PP 2', 'DP 8 EP 8 PP 2']
    """
    if gpus <= per_server:
        return [Layout(gpus // stages, pipeline=stages) for stages in range(2, gpus + 1) if gpus % stages == 0]
    layouts, servers = list[Layout](), gpus // per_server
    for stages in (count for count in range(2, servers + 1) if servers % count == 0 and gpus % per_server == 0):
        cuts = (per_server, 1, 1), (per_server, 1, per_server), (1, per_server, per_server)
        layouts += [Layout(*cut, servers // stages, stages) for cut in dict.fromkeys(cuts)]
    return layouts


@dataclass(frozen=True)
class EplbSettings:
    """Settings of an engine's own balancer, which moves experts by the load of past steps.

    Attributes:
        window: number of past steps whose load the balancer uses.
        interval: number of steps between two changes of the placement.

    Raises:
        BadInput: if a number is below 1.
    """

    window: int
    interval: int

    def __post_init__(self) -> None:
        if min(self.window, self.interval) < 1:
            raise BadInput(f"EPLB: expected a window and an interval from 1 step on, found {self.window} and {self.interval}")


@dataclass(frozen=True)
class ServingWay:
    """Settings with which an engine serves, as a launch command states them and a simulation needs them.

    Attributes:
        engine: one of SERVING_ENGINES.
        layout: division of the model over GPUs.
        exchange: one of EXCHANGES.
        placement: placement of experts when serving starts, one of PLACEMENTS.
        redundant: number of expert slots of a layer, over all GPUs of a copy, minus the number of experts.
        eplb: settings of the engine's own balancer; None: it is off.
        balance: choice among an expert's replicas in each step: "" (in turn or at random) or "lplb" (by a linear program).
        overlap: whether a batch is cut in halves, so that one computes during the other's exchanges.
        per_server: GPUs of a server.
        nvlink: whether NVLink connects the GPUs of a server.
        experts: number of routed experts of a layer; 0: unknown, so that slots are not checked.
        batched_tokens: the most tokens of a data-parallel rank in a step; 0: the engine's default.
        stage: the one of STAGES that these GPUs serve, apart from the other; empty: both.
        first_gpu: number of the first of these GPUs.

    Raises:
        BadInput: if a name is unknown, a number is out of range, or slots cannot be divided evenly over the GPUs.
    """

    engine: str
    layout: Layout
    exchange: str
    placement: str = "linear"
    redundant: int = 0
    eplb: EplbSettings | None = None
    balance: str = ""
    overlap: bool = False
    per_server: int = 8
    nvlink: bool = True
    experts: int = 0
    batched_tokens: int = 0
    stage: str = ""
    first_gpu: int = 0

    def __post_init__(self) -> None:
        check_one_of("exchange", self.exchange, EXCHANGES)
        check_one_of("placement", self.placement, PLACEMENTS)
        check_one_of("balance", self.balance, BALANCES)
        if min(self.redundant, self.experts, self.batched_tokens) < 0 or self.per_server < 1:
            raise BadInput("a way of serving: expected no negative numbers of experts, and 1 GPU or more in a server")
        even = self.experts and (self.redundant or self.eplb)
        if even and (slots := self.experts + self.redundant) % self.layout.expert:
            raise BadInput(f"`redundant`: expected as many slots on each of {self.layout.expert} GPUs, found {slots} in all")
        copy, server = sorted((self.layout.copy_gpus, self.per_server))
        if self.layout.gpus > self.per_server and server % copy:
            raise BadInput(f"`layout`: expected copies that fill servers of {self.per_server} GPUs, found {self.layout}")

    @property
    def hosts(self) -> int:
        """Number of servers that one copy runs on."""
        return -(-self.layout.copy_gpus // self.per_server)

    @property
    def stage_hosts(self) -> int:
        """Number of servers over which exchanges and all-reduces of a layer run."""
        return -(-self.layout.stage_gpus // self.per_server)

    @property
    def exchanging(self) -> dict[str, Any]:
        """Arguments of `step_seconds`: the exchange, whether tokens travel in their experts' number format, and kernels.

        SGLang's gather (layers/dp_attention.py) is before tokens are quantised. Experts at fp8 run in DeepGEMM's kernels behind
        low-latency exchanges, in SGLang behind all that route (layers/quantization/fp8.py). vLLM's others are no faster than
        Triton's fused ones: its pull 29346, and its recipe of MiniMax-M2.
        """
        sends, sglang = EXCHANGES[self.exchange].sends, self.engine == "sglang"
        fused = sends != "route" if sglang else self.exchange not in LOW_LATENCY
        return {"exchange": self.exchange, "quantised": not (sglang and sends == "gather"), "fused": fused}


@dataclass(frozen=True)
class LaunchPlace:
    """The server and GPUs on which one launch command runs.

    Attributes:
        node: number of the server within its copy, from 0.
        host: placeholder of the server's address, such as HOST_0.
        head: placeholder of the address of the copy's first server.
        copy: number of the copy on its server, which determines its port and GPUs.
        devices: the GPUs to use; empty: all.
    """

    node: int
    host: str
    head: str
    copy: int
    devices: tuple[int, ...]


def launch_places(way: ServingWay) -> Iterator[LaunchPlace]:
    """Yields a LaunchPlace for each launch command of a way of serving, copy by copy and server by server."""
    size = way.layout.copy_gpus
    together, (server, gpu) = max(1, way.per_server // size), divmod(way.first_gpu, way.per_server)
    for copy in range(way.layout.copies):
        first, at = (copy // together, copy % together) if way.hosts == 1 else (copy * way.hosts, 0)
        begin, first = gpu + at * size, server + first
        devices = tuple(range(begin, begin + size)) if gpu or min(together, way.layout.copies) > 1 else ()
        for node in range(way.hosts):
            yield LaunchPlace(node, f"HOST_{first + node}", f"HOST_{first}", gpu + at, devices)


def launch_lines(
    way: ServingWay, words: Callable[[LaunchPlace], list[str]], port: int, visible: str = "CUDA_VISIBLE_DEVICES"
) -> str:
    """Returns shell commands, one per line; with several servers, each follows a comment that names its server.

    Args:
        way: the way of serving.
        words: function from a LaunchPlace to the words of its command.
        port: port of the first copy on a server.
        visible: environment variable that lists the devices which a process sees.
    """
    places = list(launch_places(way))
    lines: list[str] = []
    for place in places:
        lines += [f"# on {place.host}"] * bool(way.stage or len({place.host for place in places}) > 1)
        command = [f"{visible}={','.join(map(str, place.devices))}"] * bool(place.devices)
        command += words(place) + ([f"--port {port + place.copy}"] if place.copy else [])
        lines.append(" ".join(command))
    return "\n".join(lines)


@dataclass(frozen=True)
class DispatchFlag:
    """A setting with which an engine spreads requests over data-parallel ranks.

    Attributes:
        words: what to set.
        dispatch: the way, as in `RequestOptions.dispatch`.
        rank: the way whose rule chooses the rank, if not that of `dispatch`.
    """

    words: str
    dispatch: str
    rank: str = ""


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version."""
    return tuple(map(int, version.split(".")))


@dataclass(frozen=True)
class ServingEngine:
    """A serving engine: its defaults, its settings, and its commands. The docstring of its module lists the settings.

    Attributes:
        name: the engine's name.
        versions: the first and the last version of the engine to which this description applies.
        exchanges: the engine's own name for each of the EXCHANGES that it has.
        launch: function (way, model's name or path, placement file) -> shell commands.
        refuses: function from a way to a dict: possible reasons against serving in that way, True for those that apply.
        eplb: default settings of the engine's own balancer.
        default_exchange: function from a way to the name of the exchange that the engine uses if none is set; the way's own
            exchange must be an allgather.
        balances: the names of BALANCES that the engine supports.
        overlaps: names in EXCHANGES with which batches can be cut in halves.
        halves_from: minimum tokens of a rank, in a step of prompts and in one of answers, for which batches are cut.
        scatters: whether all-to-alls can be used if attention is cut over all GPUs of a copy, which then divide the tokens.
        moves_wait: whether steps wait while the engine's balancer moves experts.
        form: the placement format that the engine reads (one of PLACEMENT_FORMATS); None: the plan itself, by aurora's plugin.
        replicate: the method of REPLICAS whose placements the engine supports.
        file: name of the placement file that `aurora recommend` writes.
        files: function (way, placement file) -> dict from the names of further files in its folder to their texts.
        dispatch: the way in which it spreads requests over data-parallel ranks by default, as in `RequestOptions.dispatch`.
        dispatch_flags: settings that spread them in other ways.
        since: the first version that has an exchange, for those that came after the first of `versions`.
        pools: what joins pools that serve prefill and decode apart; empty: the commands do not join them.
    """

    name: str
    versions: tuple[str, str]
    exchanges: Mapping[str, str]
    launch: Callable[[ServingWay, str, Path], str]
    refuses: Callable[[ServingWay], Mapping[str, bool]]
    eplb: EplbSettings
    default_exchange: Callable[[ServingWay], str]
    balances: Collection[str] = ()
    overlaps: Collection[str] = ()
    halves_from: tuple[int, int] = (2, 2)
    scatters: bool = False
    moves_wait: bool = False
    form: str | None = None
    replicate: str = "equal-split"
    file: str = "placement.json"
    files: Callable[[ServingWay, Path], dict[str, str]] = lambda way, file: {}
    dispatch: str = "requests"
    dispatch_flags: Sequence[DispatchFlag] = ()
    since: Mapping[str, str] = field(default_factory=dict)
    pools: str = ""

    def at(self, version: str) -> Self:
        """Returns the engine with the exchanges that a version has; all of them if `version` is empty.

        Raises:
            BadInput: if the version is not numbers with points between them.
        """
        if version and not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}", version):
            raise BadInput(f"`engine`: expected a version such as {self.versions[1]} after ==, found {version!r}")
        later = {name for name, first in self.since.items() if version and _numbers(version) < _numbers(first)}
        return replace(self, exchanges={name: own for name, own in self.exchanges.items() if name not in later})

    @property
    def known_versions(self) -> str:
        """The versions to which the description applies, such as "0.30 to 0.33"."""
        return " to ".join(dict.fromkeys(self.versions))

    def describes(self, version: str) -> bool:
        """Returns whether the description applies to a version; to an empty one it does."""
        first, last = map(_numbers, self.versions)
        return not version or (first <= _numbers(version)[: len(first)] and _numbers(version)[: len(last)] <= last)

    def check(self, way: ServingWay) -> None:
        """Raises BadInput, with the reason in one sentence, if the engine cannot serve in a way."""
        if why := next((why for why, holds in {**self._conflicts(way), **self.refuses(way)}.items() if holds), ""):
            raise BadInput(f"{self.name}: {why}")

    def command(self, way: ServingWay, model: str, file: Path) -> str:
        """Returns the shell commands that start the engine with a way's settings, and defaults otherwise.

        With several servers, HOST_0, HOST_1, ... are placeholders for their addresses.

        Args:
            way: the way of serving.
            model: the model's name or path, as the engine loads it.
            file: the placement file; for an engine whose `form` is None, the plan. The command expects the engine's further
                `files` in the same folder.

        Raises:
            BadInput: if the engine cannot serve in that way.
        """
        self.check(way)
        return self.launch(way, model, file)

    def default(self, gpus: int, per_server: int, experts: int = 0, nvlink: bool = True) -> ServingWay:
        """Returns the engine's default way of serving: only expert parallelism over data-parallel ranks is set.

        Args:
            gpus: number of GPUs.
            per_server: GPUs of a server.
            experts: routed experts of a layer; 0: unknown.
            nvlink: whether NVLink connects the GPUs of a server.
        """
        return self._only(Layout(data=gpus, expert=gpus), per_server, experts, nvlink)

    def ways(self, gpus: int, per_server: int, experts: int = 0, nvlink: bool = True) -> list[ServingWay]:
        """Returns all ways in which the engine can serve on these GPUs, the default first; arguments as in `default`.

        They are: the default; the default with one change, which is another exchange, overlapping halves of a batch, another
        placement or the engine's balancer; the same with as few replicas as make slots equal, if experts do not divide evenly,
        and with one further slot per GPU; and other layouts with each exchange.
        """
        way = self.default(gpus, per_server, experts, nvlink)
        more, layouts = -experts % gpus + gpus, [Layout(gpus), Layout(gpus, expert=gpus)]
        for copies in (count for count in range(2, gpus + 1) if gpus % count == 0):
            size = gpus // copies
            layouts += [Layout(size, copies=copies), *([Layout(1, size, size, copies)] if size > 1 else [])]
        layouts += [Layout(cut, gpus // cut, gpus) for cut in (2, 4, 8) if gpus % cut == 0 and cut < gpus]
        layouts += staged_layouts(gpus, per_server)
        changes: list[dict[str, Any]] = [{}, {"eplb": self.eplb}, {"placement": "plan"}]
        for redundant in {-experts % gpus: None, more: None}:
            changes += [{"eplb": self.eplb, "redundant": redundant}, {"placement": "plan", "redundant": redundant}]
        changes += [{"eplb": self.eplb, "redundant": more, "balance": balance} for balance in self.balances]
        halves = [{}, {"overlap": True}]
        everywhere = [{"exchange": name, **change, **cut} for name in self.exchanges for change in changes for cut in halves]
        makers = [partial(replace, way, **change) for change in everywhere]
        for layout in layouts:
            makers += [partial(self._only, layout, per_server, experts, nvlink, exchange) for exchange in ("", *self.exchanges)]
        ways = {way: None}
        for make in makers:
            with suppress(BadInput):
                self.check(other := make())
                ways[other] = None
        return list(ways)

    def _only(self, layout: Layout, per_server: int, experts: int, nvlink: bool, exchange: str = "") -> ServingWay:
        """Returns the way that the engine takes if nothing but the layout, and perhaps the exchange, is set."""
        usual = "allgather" if layout.data > 1 else "all-reduce"
        way = ServingWay(self.name, layout, exchange or usual, per_server=per_server, nvlink=nvlink, experts=experts)
        return replace(way, exchange=self.default_exchange(way)) if layout.data > 1 and not exchange else way

    def _conflicts(self, way: ServingWay) -> dict[str, bool]:
        """Returns, with whether they hold, reasons that are no engine's own, or for which this one has no setting."""
        exchange, layout, moved = EXCHANGES[way.exchange], way.layout, way.placement == "plan" or way.eplb is not None
        whole, balances = layout.expert == layout.stage_gpus > 1, exchange.sends == "balance"
        return {
            f"expected an exchange of {', '.join(self.exchanges)}, found {way.exchange}": way.exchange not in self.exchanges,
            "all-reduce goes without data-parallel ranks, others with": (layout.data > 1) == (exchange.sends == "reduce")
            and not (self.scatters and exchange.sends == "route"),
            f"{way.exchange} needs whole experts on all GPUs": (exchange.sends == "route" or balances) and not whole,
            f"{way.exchange} needs NVLink ({exchange.nvlink})": bool(exchange.nvlink)
            and (not way.nvlink or (exchange.nvlink == "all" and way.stage_hosts > 1)),
            "a placement needs whole experts": layout.expert == 1 and (moved or way.placement != "linear"),
            "replicas need a plan or the engine's balancer": way.redundant > 0 and not moved,
            "a plan and the engine's balancer exclude each other": way.placement == "plan" and way.eplb is not None,
            f"it has no {way.balance} in each step": way.balance not in ("", *self.balances),
            f"batches overlap with {', '.join(self.overlaps) or 'no exchange'}": way.overlap > (way.exchange in self.overlaps),
            f"{way.exchange} balances every step by itself": balances and (moved or way.placement != "linear"),
            "stages go with experts in sequence and whole batches": layout.pipeline > 1 and (moved or way.overlap),
        }
