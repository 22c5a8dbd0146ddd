"""Replays changing traffic under several ways to adapt placements, and compares GPU loads, bytes moved and stalls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aurora.algorithms.control.controller import Controller, load_cost_G, slots_in_use, slowest_port_Bps
from aurora.algorithms.control.load_tracker import ReplicaParts, gpu_loads
from aurora.algorithms.control.move_rounds import move_sequence
from aurora.algorithms.replicas.rebalance import rebalance, rebalance_inside
from aurora.algorithms.replicas.registry import place_unbounded
from aurora.errors import BadInput, check_one_of
from aurora.types import ControlOptions, GpuSlots, Placement, Plan, Profile
from aurora.types.arrays import BoolArray, FloatArray, IntArray
from aurora.types.options import LENGTHENED, MOST, MOST_TOKENS, at_most

WHOLE = 10  # windows over which the worst mean is taken
FLASH = 0.9  # part of a window's tokens that a crowd sends
FLASHES = 5  # times its length after which a crowd comes again

Mixture = Callable[[int, int, int, np.random.Generator], FloatArray]


def _alternating(windows: int, domains: int, lasting: int, rng: np.random.Generator) -> FloatArray:
    """One domain after the other, each for as many windows."""
    return np.asarray(np.eye(domains)[np.arange(windows) // lasting % domains])


def _steps(windows: int, domains: int, lasting: int, rng: np.random.Generator) -> FloatArray:
    """Another domain at random times, so many windows apart in the mean."""
    number_W = np.cumsum(rng.random(windows) < 1 / lasting)
    jump_X = rng.integers(1, domains, int(number_W[-1]) + 1).cumsum()
    return np.asarray(np.eye(domains)[jump_X[number_W] % domains])


def _drift(windows: int, domains: int, lasting: int, rng: np.random.Generator) -> FloatArray:
    """From each domain to the next little by little, in so many windows."""
    at_W = np.arange(windows) / lasting
    first_W, part_W = np.floor(at_W).astype(np.int64), at_W % 1
    each_DD = np.eye(domains)
    return np.asarray(each_DD[first_W % domains] * (1 - part_W)[:, None] + each_DD[(first_W + 1) % domains] * part_W[:, None])


def _diurnal(windows: int, domains: int, lasting: int, rng: np.random.Generator) -> FloatArray:
    """All domains at once, each with its time of the day; a day has so many windows."""
    phase_WD = 2 * np.pi * (np.arange(windows)[:, None] / lasting - np.arange(domains) / domains)
    part_WD = (1 + np.cos(phase_WD)) ** 2
    return np.asarray(part_WD / part_WD.sum(axis=1, keepdims=True))


def _flash_crowd(windows: int, domains: int, lasting: int, rng: np.random.Generator) -> FloatArray:
    """The first domain; now and then a crowd of another one, for so many windows."""
    time_W = np.arange(windows) // lasting
    other_W = np.where(time_W % FLASHES == FLASHES - 1, 1 + time_W // FLASHES % (domains - 1), 0)
    each_DD = np.eye(domains)
    return np.asarray((1 - FLASH) * each_DD[np.zeros_like(other_W)] + FLASH * each_DD[other_W])


CHANGES: dict[str, Mixture] = {
    "alternating": _alternating,
    "steps": _steps,
    "drift": _drift,
    "diurnal": _diurnal,
    "flash-crowd": _flash_crowd,
}
RECORDED = "recorded"  # the profiles' own windows, in sequence


@dataclass(frozen=True, eq=False)
class ChangingTraffic:
    """W windows of expert loads, drawn from traffic that changes between D domains, such as chat and code.

    Attributes:
        load_WLE: (W, L, E) float64, tokens of each expert by window.
        part_WD: (W, D) float64, the part of each domain in each window; each row sums to 1.
        share_DLE: (D, L, E) float64, the mean share of each expert in a layer's tokens, by domain.
    """

    load_WLE: FloatArray
    part_WD: FloatArray
    share_DLE: FloatArray

    @property
    def mean_WLE(self) -> FloatArray:
        """(W, L, E) float64, the expected loads of each window: tokens x the domains' mean shares, without random draws."""
        return np.asarray(np.tensordot(self.part_WD, self.share_DLE, 1) * self.load_WLE.sum(axis=2, keepdims=True))

    @property
    def known_W(self) -> BoolArray:
        """(W,) bool: True for windows with the same main domain as the window before, whose loads are predictable."""
        largest_W = self.part_WD.argmax(axis=1)
        return np.asarray(np.concatenate([[False], largest_W[1:] == largest_W[:-1]]))


def changing_traffic(
    profiles: Sequence[Profile], change: str, windows: int = 120, lasting: int = 10, tokens: int | None = None, seed: int = 0
) -> ChangingTraffic:
    """Draws the loads of windows of traffic that changes between domains.

    A window mixes domains. For each domain in the mix, a recorded window is drawn, and tokens are drawn from its shares. So
    windows of one domain differ as the recorded ones do, and by chance.

    Args:
        profiles: one profile for each domain, all of one model.
        change: a name in CHANGES, or "recorded": the profiles' windows one after the other.
        windows: number of windows, W.
        lasting: number of windows that one domain, drift, day or crowd lasts.
        tokens: (token, expert) pairs of each layer in a window; None: as in the largest recorded window.
        seed: random seed of the draws.

    Raises:
        BadInput: if the change is unknown, a number is out of range, the profiles differ in layers or experts, or there is
            only one profile and the change is not "recorded".
    """
    recorded_D = [profile.tokens_TLSE.sum(axis=2) for profile in profiles]
    if len({loads_TLE.shape[1:] for loads_TLE in recorded_D}) != 1:
        raise BadInput("`profile`: expected profiles of one model, found different layers or experts")
    share_DTLE = [loads_TLE / np.maximum(loads_TLE.sum(axis=2, keepdims=True), 1) for loads_TLE in recorded_D]
    mean_DLE = np.stack([share_TLE.mean(axis=0) for share_TLE in share_DTLE])
    if change == RECORDED:
        domain_W = np.repeat(np.arange(len(profiles)), [len(loads_TLE) for loads_TLE in recorded_D])
        return ChangingTraffic(np.concatenate(recorded_D).astype(np.float64), np.eye(len(profiles))[domain_W], mean_DLE)
    check_one_of("change", change, (*CHANGES, RECORDED))
    limits = (("windows", windows, MOST_TOKENS), ("lasting", lasting, MOST), ("tokens", 1 if tokens is None else tokens, MOST))
    for name, value, most in limits:
        if value < 1:
            raise BadInput(f"`{name}`: expected one or more, found {value}")
        at_most(name, value, most)
    if len(profiles) < 2:
        raise BadInput(f"`profile`: expected two or more, between which traffic changes, found {len(profiles)}")
    rng = np.random.default_rng(seed)
    part_WD = CHANGES[change](windows, len(profiles), lasting, rng)
    total = tokens or int(max(loads_TLE.sum(axis=2).max() for loads_TLE in recorded_D))
    load_WLE = np.zeros((windows, *recorded_D[0].shape[1:]))
    for window, domain in np.argwhere(part_WD > 0).tolist():
        share_LE = share_DTLE[domain][rng.integers(len(share_DTLE[domain]))]
        busy_L = share_LE.any(axis=1)
        load_WLE[window][busy_L] += rng.multinomial(round(total * part_WD[window, domain]), share_LE[busy_L])
    return ChangingTraffic(load_WLE, part_WD, mean_DLE)


@dataclass(frozen=True, eq=False)
class Followed:
    """Result of replaying traffic under one way to adapt the placement.

    Attributes:
        name: name of the way, such as "controller" or "EPLB every 3".
        slowest_W: (W,) float64, load of the slowest GPU / mean load in each window, both summed over layers; 1 is balanced.
        bytes_W: (W,) int64, bytes of expert weights that moved before each window.
        stall_s: total seconds for which serving stopped while experts moved.
        lengthened_s: upper estimate of the total seconds that moves added to serving while both ran at the same time.
        changes: number of windows before which experts moved.
    """

    name: str
    slowest_W: FloatArray
    bytes_W: IntArray
    stall_s: float
    lengthened_s: float
    changes: int

    def worst(self, windows: int = WHOLE) -> float:
        """Returns the largest mean of `slowest_W` over any `windows` consecutive windows."""
        many = min(windows, len(self.slowest_W))
        return float(np.convolve(self.slowest_W, np.full(many, 1 / many), mode="valid").max())


@dataclass(frozen=True, eq=False)
class FollowedTraffic:
    """Result of `follow`: a replay of changing traffic.

    Attributes:
        change: the kind of change: a name in CHANGES, or "recorded".
        traffic: the windows.
        ways: the result of each way to adapt the placement, the clairvoyant's last.
    """

    change: str
    traffic: ChangingTraffic
    ways: tuple[Followed, ...]

    @property
    def counted_W(self) -> BoolArray:
        """(W,) bool: the windows on which ways are compared: the predictable ones (`known_W`), or all if there are none."""
        known_W = self.traffic.known_W
        return known_W if known_W.any() else ~known_W


def follow(
    plan: Plan,
    profiles: Profile | Sequence[Profile],
    change: str,
    *,
    windows: int = 120,
    lasting: int = 10,
    tokens: int | None = None,
    seed: int = 0,
    options: ControlOptions = ControlOptions(),
) -> FollowedTraffic:
    """Replays changing traffic, and compares ways to adapt the placement to it.

    The ways are: never, once, EPLB at intervals, aurora's controller, and two that know the coming window. `follow_traffic`
    explains each. EPLB stops serving while experts move, as in vLLM; the controller's moves run while the model serves.

    Args:
        plan: the plan in force before the first window, of which the first model counts; the speeds and port rates of its
            cluster are used.
        profiles: one profile of that model for each domain of traffic.
        change: how traffic changes between the domains: "alternating", "steps", "drift", "diurnal" or "flash-crowd";
            "recorded": the profiles' windows one after the other.
        windows: number of windows of traffic.
        lasting: number of windows that one domain, drift, day or crowd lasts.
        tokens: (token, expert) pairs of each layer in a window; None: as in the largest recorded window.
        seed: random seed of the draws.
        options: options of the controller.

    Returns:
        FollowedTraffic, with load, bytes and stalls of each way.

    Raises:
        BadInput: if the change is unknown, a number is out of range, the profiles are of another model, or there is only one
            profile and the change is not "recorded".

    Example:
        >>> import aurora
        >>> one, other = (
        ...     aurora.synthetic_profile("zipf:1", "mixtral-topics", aurora.SyntheticOptions(seed=seed)) for seed in (0, 1)
        ... )
        >>> plan = aurora.plan(aurora.load("demo-4"), one)
        >>> [way.name for way in aurora.follow(plan, [one, other], "alternating", windows=30).ways][-3:]
        ['controller', 'mean known', 'clairvoyant']
    """
    profiles = [profiles] if isinstance(profiles, Profile) else profiles
    placed = plan.models[0].placement
    traffic = changing_traffic(profiles, change, windows, lasting, tokens, seed)
    _, layers, experts = traffic.load_WLE.shape
    if (layers, experts) != (len(placed.slots_LG), placed.experts):
        raise BadInput(
            f"`profile`: expected {len(placed.slots_LG)} layers of {placed.experts} experts as in the plan, "
            f"found {layers} of {experts}"
        )
    slots = slots_in_use(placed, load_cost_G(plan.cluster, profiles[0]))
    hierarchy = plan.models[0].hierarchy
    port_Bps = slowest_port_Bps(plan.cluster, inside=hierarchy is not None)
    server_G = None if hierarchy is None else hierarchy.server_G
    ways = follow_traffic(traffic, placed, slots, profiles[0].expert_bytes, port_Bps, options, server_G=server_G)
    return FollowedTraffic(change, traffic, tuple(ways))


_Way = Callable[[int, IntArray], Placement | IntArray]  # for a window and the slots in force: the slots, or a placement


def follow_traffic(
    traffic: ChangingTraffic,
    held: Placement | IntArray,
    slots: GpuSlots,
    expert_bytes: int,
    port_Bps: float,
    options: ControlOptions = ControlOptions(),
    every: Sequence[int] = (1, 3, 10),
    server_G: IntArray | None = None,
) -> list[Followed]:
    """Replays windows of traffic under each way to adapt the placement; returns one result per way.

    - "as it is": the placement never changes.
    - "planned once": the placement is rebalanced after the first window, for that window's loads.
    - "EPLB every N": EPLB places experts anew every N windows, for the loads of the last N. Serving stops while experts move,
      as in vLLM. EPLB takes all GPUs as equal, with the slots of the largest.
    - "controller": aurora's controller. A change takes effect after the whole windows that its moves take at the ports' rate.
    - "mean known": rebalances before each window for its expected loads, without the random draws.
    - "clairvoyant": rebalances before each window for its actual loads.

    Args:
        traffic: the windows.
        held: the placement in force before the first window; or (L, G, P) int64, the expert in each of its slots, -1 for none.
        slots: the slots of the GPUs and the cost of load there.
        expert_bytes: bytes of an expert's weights.
        port_Bps: bytes per second that a GPU's port sends, and receives.
        options: options of the controller.
        every: the intervals N, in windows, of the EPLB ways.
        server_G: (G,) int64, the server of each GPU, if all-to-alls are hierarchical; experts then stay on their servers,
            except under EPLB. None: all-to-alls are flat.
    """
    load_WLE, mean_WLE = traffic.load_WLE, traffic.mean_WLE
    alike = GpuSlots.equal(slots.gpus, int(slots.slots_G.max()))
    controller = Controller(held, expert_bytes, options, slots, port_Bps * slots.gpus, server_G=server_G)

    under_way: list[tuple[float, float]] = []  # the window from which moves are done, and their seconds

    def levelled(load_LE: FloatArray, held_LGP: IntArray) -> IntArray:
        if server_G is None:
            return rebalance(load_LE, held_LGP, slots).held_LGP
        return rebalance_inside(load_LE, held_LGP, ReplicaParts(held_LGP, server_G).parts(held_LGP), slots, server_G)

    def moving(held_LGP: IntArray, next_LGP: IntArray) -> tuple[int, float]:
        """The bytes that move, and the seconds that this takes."""
        into_G, out_G = _moved_G(held_LGP, next_LGP)
        return into_G.sum() * expert_bytes, float(max(into_G.max(), out_G.max()) * expert_bytes / port_Bps)

    def once(window: int, held_LGP: IntArray) -> IntArray:
        return levelled(load_WLE[0], held_LGP) if window == 1 else held_LGP

    def controlled(window: int, held_LGP: IntArray) -> IntArray:
        if window and (decision := controller.window(load_WLE[window - 1])).action != "keep":
            _, seconds = moving(held_LGP, decision.held_LGP)
            under_way.append((window + seconds // options.period_s, seconds))
        if under_way and under_way[0][0] <= window:
            controller.moved(under_way.pop()[1])
        return controller.held_LGP

    def knowing(known_WLE: FloatArray) -> _Way:
        return lambda window, held_LGP: levelled(known_WLE[window], held_LGP)

    def eplb(many: int) -> _Way:
        def planned(window: int, held_LGP: IntArray) -> Placement | IntArray:
            if not window or window % many:
                return held_LGP
            return place_unbounded(load_WLE[window - many : window].sum(axis=0), alike, "eplb")

        return planned

    ways: dict[str, tuple[_Way, bool]] = {
        "as it is": (lambda window, held_LGP: held_LGP, False),
        "planned once": (once, False),
        **{f"EPLB every {many}": (eplb(many), True) for many in every},
        "controller": (controlled, False),
        "mean known": (knowing(mean_WLE), False),
        "clairvoyant": (knowing(load_WLE), False),
    }

    def followed(name: str, way: _Way, stops: bool) -> Followed:
        """The replay of one way, whose moves stop serving or run beside it."""
        slowest_W, bytes_W, moving_s = np.ones(len(load_WLE)), np.zeros(len(load_WLE), dtype=np.int64), 0.0
        held_LGP = held.held_LGP() if isinstance(held, Placement) else held
        split = ReplicaParts(held, server_G)
        placement: Placement | None = None  # of the last change, if it tells the parts of replicas
        for window, load_LE in enumerate(load_WLE):
            target = way(window, held_LGP)
            if isinstance(target, Placement):
                placement, next_LGP = target, target.held_LGP(held_LGP.shape[2])
            else:
                next_LGP = target
            if next_LGP is not held_LGP:
                bytes_W[window], seconds = moving(held_LGP, next_LGP)
                moving_s, held_LGP = moving_s + seconds, next_LGP
                split.change(held_LGP)
            if placement is None:
                gpu_LG = gpu_loads(load_LE[None], held_LGP, slots.cost_G, split.parts(held_LGP))[0]
            else:
                gpu_LG = np.stack([load_E @ placement.split_EG(layer) for layer, load_E in enumerate(load_LE)]) * slots.cost_G
            if gpu_LG.any():
                slowest_W[window] = gpu_LG.max(axis=1).sum() / gpu_LG.mean(axis=1).sum()
        stall_s, beside_s = (moving_s, 0.0) if stops else (0.0, moving_s * LENGTHENED)
        return Followed(name, slowest_W, bytes_W, stall_s, beside_s, int(np.count_nonzero(bytes_W)))

    return [followed(name, way, stops) for name, (way, stops) in ways.items()]


def _moved_G(held_LGP: IntArray, next_LGP: IntArray) -> tuple[IntArray, IntArray]:
    """(G,) experts that each GPU receives, and sends, between two placements; holders of an expert share its sends."""
    into_G, out_G = np.zeros((2, held_LGP.shape[1]), dtype=np.int64)
    for held_GP, next_GP in zip(held_LGP, next_LGP, strict=True):
        if np.array_equal(held_GP, next_GP):
            continue
        for move in move_sequence(held_GP[None], next_GP[None])[0]:
            into_G[move.dst] += 1
            out_G[move.src] += 1
    return into_G, out_G
