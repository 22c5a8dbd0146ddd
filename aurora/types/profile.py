"""Profile: measurements of one model: the routing of its tokens, the seconds of its phases, and its fingerprint."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self, overload

import numpy as np
from numpy.typing import ArrayLike

from aurora.errors import BadInput
from aurora.types.arrays import FloatArray, IntArray, Value, check_arrays, check_name, layer_numbers
from aurora.types.cluster import Gpu
from aurora.types.model_identity import ModelIdentity, same_model
from aurora.types.token_routing import TokenRouting

STAGES = ("prefill", "decode")
PHASES = ("gate", "expert", "aggregate")
OVERHEAD = "overhead"  # what a grouped kernel takes beyond its experts; a kind of GPU may lack it
MOST_OF_CURVE = 1e12  # tokens or seconds: more are damage
ALIGNED_BYTES = 16  # alignment of the parts of a deduplicated message


@dataclass(frozen=True, eq=False, repr=False)
class Curve(Value):
    """Seconds by number of tokens: linear between measured points, and with the last slope beyond them.

    Attributes:
        tokens_X: (X,) float64, token counts, rising from zero or more.
        seconds_X: (X,) float64, the seconds at these token counts.
    """

    tokens_X: FloatArray
    seconds_X: FloatArray

    def __post_init__(self) -> None:
        check_arrays(self, "curve: ")
        if not len(self.tokens_X):
            raise BadInput("curve: expected a point or more, found none")
        if (np.diff(self.tokens_X) <= 0).any() or self.tokens_X[0] < 0 or (self.seconds_X < 0).any():
            raise BadInput("curve: expected rising token counts from zero or more, and seconds of zero or more")
        if (most := max(self.tokens_X[-1], self.seconds_X.max())) > MOST_OF_CURVE:
            raise BadInput(f"curve: expected tokens and seconds up to {MOST_OF_CURVE:g}, found {most:g}")

    def __call__(self, tokens: ArrayLike) -> FloatArray:
        """(...) float64: the seconds for `tokens` (...); zero tokens take no time."""
        at = np.asarray(tokens, dtype=np.float64)
        seconds = np.interp(at, self.tokens_X, self.seconds_X)
        if len(self.tokens_X) > 1:
            slope = (self.seconds_X[-1] - self.seconds_X[-2]) / (self.tokens_X[-1] - self.tokens_X[-2])
            seconds = seconds + np.maximum(at - self.tokens_X[-1], 0.0) * max(slope, 0.0)
        return np.where(at > 0, seconds, 0.0)

    def expected(self, tokens: ArrayLike, of: ArrayLike) -> FloatArray:
        """Returns (...) float64, the expected seconds of one expert in a step.

        Each of the step's tokens chooses the expert with the same probability, tokens / of. The expert is active with
        probability p = 1 - (1 - tokens / of)^of; if active, it takes the seconds of its mean number of tokens, tokens / p. This
        is exact if the curve is a straight line. With of = 64 and tokens = 6.4, p is 0.999.

        Args:
            tokens: (...) mean number of tokens that choose the expert.
            of: (...) number of tokens of the step.
        """
        at, most = np.asarray(tokens, dtype=np.float64), np.asarray(of, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            chosen = np.where(most > 0, np.minimum(at / most, 1.0), 0.0)
            active = np.where(chosen > 0, -np.expm1(most * np.log1p(-chosen)), 0.0)
        return np.asarray(active * self(at / np.where(active > 0, active, 1.0)))


CurvesByKind = Mapping[str, Mapping[str, Curve]]  # by GPU kind and phase


def _check_curves(what: str, model: str, fingerprint: str, curves: CurvesByKind) -> None:
    """Raises BadInput unless names are text, and there is a curve of each phase for at least one kind of GPU."""
    for name in (model, fingerprint, *curves):
        check_name(f"{what}: model, fingerprint and kinds", name)
    if not curves:
        raise BadInput(f"{what}: expected compute curves of at least one GPU kind, found none")
    for kind, phases in curves.items():
        if missing := [phase for phase in PHASES if phase not in phases]:
            raise BadInput(f"{what}: the curves of kind {kind!r} lack {', '.join(missing)}")


MOST_UNEVEN = 10  # tokens of one layer over those of another: recorders begin and end in the middle of a pass


def check_counts(load_LE: IntArray, top_k: int) -> None:
    """Checks that counts can come from a router: in every layer each token chooses top_k different experts.

    Args:
        load_LE: (L, E) tokens of each expert.
        top_k: experts per token.

    Raises:
        BadInput: if an expert has more tokens than its layer, or one layer has MOST_UNEVEN times the tokens of another.
    """
    total_L, most_L = load_LE.sum(axis=1), load_LE.max(axis=1)
    tokens_L = -(-total_L // top_k)
    for layer in np.flatnonzero(most_L > tokens_L):
        tokens = f"one for each of the {tokens_L[layer]} tokens ({total_L[layer]} choices at {top_k} a token)"
        raise BadInput(f"MoE layer {layer}: expected at most {tokens} of one expert, found {most_L[layer]}")
    if total_L.max() > MOST_UNEVEN * total_L.min():
        few, many = int(total_L.argmin()), int(total_L.argmax())
        totals = f"{total_L[few]} in MoE layer {few} and {total_L[many]} in {many}"
        raise BadInput(f"expected about as many choices in every layer, as every token passes all, found {totals}")


def deal_counts(counts_TLE: IntArray, sources: int) -> IntArray:
    """Divides token counts (T, L, E) evenly over source ranks; returns (T, L, S, E) int64.

    A layer's tokens, window by window and expert by expert, go to the sources in turn. So two sources differ by at most one
    token in each count, in each window's sum and in the total.
    """
    steps, layers, experts = counts_TLE.shape
    line_LX = counts_TLE.transpose(1, 0, 2).reshape(layers, -1)
    ends_L1X = line_LX.cumsum(axis=1)[:, None, :]
    starts_L1X = ends_L1X - line_LX[:, None, :]
    source_S1 = np.arange(sources)[:, None]
    # Of the numbers below x, (x - s + S - 1) // S are s modulo S.
    dealt_LSX = (ends_L1X - source_S1 + sources - 1) // sources - (starts_L1X - source_S1 + sources - 1) // sources
    dealt_TLSE: IntArray = dealt_LSX.reshape(layers, sources, steps, experts).transpose(2, 0, 1, 3)
    return dealt_TLSE


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Value):
    """The measured routing and compute times of one model, which do not depend on the placement.

    Attributes:
        model: the model's name.
        fingerprint: hashes of its router weights, see `same_model`; empty when synthetic.
        tokens_TLSE: (T, L, S, E) int64, how many (token, expert) pairs source rank s sent to expert e in window t, MoE layer l.
            A token counts once for each of its `top_k` experts. A window is one forward pass of every source rank, or several.
        top_k: experts per token.
        dispatch_bytes: payload bytes of one (token, expert) pair in the dispatch.
        combine_bytes: payload bytes of one (token, expert) pair in the combine.
        expert_bytes: bytes of one expert's weights in one layer.
        other_bytes: bytes of all other weights, which every rank holds.
        curves: by GPU kind, a Curve of seconds for each of PHASES; the first kind is the reference. `gate`: work of a rank
            between two MoE layers (attention, norms, router), by its tokens. `expert`: one expert, by the tokens that it
            receives. `aggregate`: the weighted sum, by the tokens that start on the rank. A kind may also have OVERHEAD: the
            seconds of the grouped kernel besides its active experts, by the layer's (token, expert) pairs on all ranks. A
            rank's experts take OVERHEAD plus the `expert` seconds of each active expert.
        provenance: notes by name on how, where and from what it was measured, such as "tool" and "date".
        routing: the routing token by token, whose counts are exactly tokens_TLSE; None if it was not kept.
        stage_T: the stage of each window's tokens, one of STAGES; None if unknown.
        dense_layers: indices, among all decoder layers, of the layers without experts, ascending; the other decoder layers are
            the L layers of tokens_TLSE.
        expert_groups: (n, m) for group-limited routing: n groups of equally many consecutive experts; a token's experts lie in
            at most m groups. (1, 1) for a router without groups, or if unknown.
        kv_bytes: bytes of the KV cache that a token takes on a GPU, at 16 bits a number; None if unknown.
        step_tokens: (fewest, most) tokens of all sources in a step. `seconds` then assumes that a window's tokens are spread
            over many steps of such sizes. None: each window is one step. Not saved to files.

    Raises:
        BadInput: if a field is out of range, or fields contradict each other.
    """

    model: str
    fingerprint: str
    tokens_TLSE: IntArray
    top_k: int
    dispatch_bytes: int
    combine_bytes: int
    expert_bytes: int
    other_bytes: int
    curves: CurvesByKind
    provenance: Mapping[str, str] = field(default_factory=dict)
    routing: TokenRouting | None = None
    stage_T: tuple[str, ...] | None = None
    dense_layers: tuple[int, ...] = ()
    expert_groups: tuple[int, int] = (1, 1)
    kv_bytes: float | None = None
    step_tokens: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        what = f"profile of {self.model!r}"
        check_arrays(self, f"{what}, ")
        if 0 in self.tokens_TLSE.shape:
            raise BadInput(f"{what}: tokens_TLSE is empty, its shape is {self.tokens_TLSE.shape}")
        for name in ("top_k", "dispatch_bytes", "combine_bytes", "expert_bytes", "other_bytes"):
            value, least = getattr(self, name), int(name == "dispatch_bytes")
            if type(value) is not int or not least <= value < 2**62:
                raise BadInput(f"{what}: {name} must be a whole number from {least} to 2**62, found {value}")
        if self.kv_bytes is not None and not 0 <= self.kv_bytes < 2**62:
            raise BadInput(f"{what}: expected kv_bytes of zero or more, found {self.kv_bytes}")
        _check_curves(what, self.model, self.fingerprint, self.curves)
        if not 1 <= self.top_k <= self.experts:
            raise BadInput(f"{what}: top_k must be between 1 and its {self.experts} experts, found {self.top_k}")
        most = float(self.tokens_TLSE.sum(dtype=np.float64)) * max(float(self.dispatch_bytes), float(self.combine_bytes))
        if most >= 2**62:
            raise BadInput(f"{what}: {most:.3g} bytes travel in all, more than 64 bits hold")
        object.__setattr__(self, "dense_layers", layer_numbers(f"{what}, dense_layers", self.dense_layers))
        self._check_groups(what)
        if self.routing is not None:
            self._check_routing(what, self.routing)
        if self.stage_T is not None and (len(self.stage_T) != self.windows or not set(self.stage_T) <= set(STAGES)):
            raise BadInput(f"{what}: expected {' or '.join(STAGES)} for each of {self.windows} windows, found {self.stage_T}")

    def __repr__(self) -> str:
        shape = f"{self.windows} windows x {self.layers} layers x {self.sources} sources x {self.experts} experts"
        return f"Profile({self.model!r}, {shape}, top-{self.top_k})"

    def _check_groups(self, what: str) -> None:
        """Raises BadInput unless the groups divide the experts and a token's groups hold as many as it chooses."""
        pair = tuple(self.expert_groups)
        if len(pair) != 2 or any(type(number) is not int for number in pair) or not 1 <= pair[1] <= pair[0]:
            raise BadInput(
                f"{what}: expected expert_groups as two whole numbers, the larger first, found {self.expert_groups!r}"
            )
        object.__setattr__(self, "expert_groups", pair)
        if self.experts % pair[0] or self.experts // pair[0] * pair[1] < self.top_k:
            raise BadInput(
                f"{what}: expected groups that divide {self.experts} experts and hold {self.top_k} of a token's, found {pair}"
            )

    def _check_routing(self, what: str, routing: TokenRouting) -> None:
        """Raises BadInput unless the token-level routing gives exactly tokens_TLSE."""
        if routing.experts_ULK.shape[1:] != (self.layers, self.top_k):
            raise BadInput(
                f"{what}: expected {self.top_k} choices of a token in each of {self.layers} layers, found experts_ULK of shape "
                f"{routing.experts_ULK.shape}"
            )
        try:
            counted_TLSE = routing.tokens_TLSE(self.windows, self.sources, self.experts)
        except BadInput as error:
            raise BadInput(f"{what}: {error}") from None
        if not np.array_equal(counted_TLSE, self.tokens_TLSE):
            t, l, s, e = np.argwhere(counted_TLSE != self.tokens_TLSE)[0].tolist()
            raise BadInput(
                f"{what}: window {t}, layer {l}, source {s}, expert {e}: expected the {self.tokens_TLSE[t, l, s, e]} tokens of "
                f"tokens_TLSE, found {counted_TLSE[t, l, s, e]} in experts_ULK"
            )

    @cached_property
    def windows(self) -> int:
        """Number of windows, T."""
        return int(self.tokens_TLSE.shape[0])

    def at_windows(self, windows: Sequence[int] | IntArray) -> Self:
        """Returns the profile of the windows with these indices, in this sequence; it has counts but no token-level routing."""
        counts_TLSE = self.tokens_TLSE[np.asarray(windows)]
        return replace(self, tokens_TLSE=counts_TLSE, stage_T=None, routing=None)

    def first_windows(self, windows: int) -> Self:
        """Returns the profile of the first `windows` windows, with their token-level routing; itself if it has no more."""
        if windows >= self.windows:
            return self
        routing = None if self.routing is None else self.routing.first_windows(windows)
        stage_T = None if self.stage_T is None else self.stage_T[:windows]
        return replace(self, tokens_TLSE=self.tokens_TLSE[:windows], stage_T=stage_T, routing=routing)

    def in_steps(self, step_tokens: tuple[int, int] | None) -> Self:
        """Returns the profile whose windows count as many steps of `step_tokens` tokens each; None: as one step each."""
        return self if step_tokens == self.step_tokens else replace(self, step_tokens=step_tokens)

    def in_format_of(self, other: Self) -> Self:
        """Returns this traffic with the bytes and the compute times of another profile, in whose number format it is served."""
        sizes = ("dispatch_bytes", "combine_bytes", "expert_bytes", "other_bytes", "kv_bytes", "curves")
        return replace(self, **{name: getattr(other, name) for name in sizes})

    def at_layers(self, layers: Sequence[int] | IntArray) -> Self:
        """Returns the profile of the MoE layers with these indices, with their token-level routing."""
        some = np.asarray(layers)
        routing = None if self.routing is None else replace(self.routing, experts_ULK=self.routing.experts_ULK[:, some])
        return replace(self, tokens_TLSE=self.tokens_TLSE[:, some], routing=routing, dense_layers=())

    def at_sources(self, sources: int) -> Self:
        """Returns the profile with its tokens redistributed to `sources` source ranks; itself if it has as many.

        With n the greatest common divisor of both numbers, old and new ranks form n groups of consecutive ranks. Each old
        group's tokens are dealt in turn to the ranks of the new group, as whole prompts where these are known. So from 8 ranks
        to 4 each pair is merged, from 4 to 8 each rank is halved, and from 4 to 6 each pair is dealt to three ranks.

        Args:
            sources: the new number of source ranks, such as the GPUs of a cluster.

        Raises:
            BadInput: if the number is not positive.

        Example:
            >>> import aurora
            >>> traffic = aurora.synthetic_profile("zipf:1", "mixtral-topics", aurora.SyntheticOptions(sources=4))
            >>> wider = traffic.at_sources(8)
            >>> wider.sources, bool((wider.load_LE == traffic.load_LE).all())
            (8, True)
        """
        if sources < 1:
            raise BadInput(f"profile of {self.model!r}: expected a positive number of source ranks, found {sources}")
        if sources == self.sources:
            return self
        groups = math.gcd(self.sources, sources)
        size, routing = sources // groups, self.routing
        if routing is not None:
            group_U = routing.source_U * groups // self.sources
            source_U = group_U * size + _turn(routing.window_U, group_U, routing.sequence_U) % size
            routing = replace(routing, source_U=source_U)
            tokens_TLSE = routing.tokens_TLSE(self.windows, sources, self.experts)
        else:
            merged_TLJE = self.tokens_TLSE.reshape(*self.tokens_TLSE.shape[:2], groups, -1, self.experts).sum(axis=3)
            tokens_TLSE = np.concatenate([deal_counts(merged_TLJE[:, :, group], size) for group in range(groups)], axis=2)
        provenance = {**self.provenance, "dealt": f"from {self.sources} source ranks to {sources}"}
        return replace(self, tokens_TLSE=tokens_TLSE, routing=routing, provenance=provenance)

    @cached_property
    def layers(self) -> int:
        """Number of MoE layers of the model, L."""
        return int(self.tokens_TLSE.shape[1])

    @cached_property
    def sources(self) -> int:
        """Number of source ranks that tokens come from, S."""
        return int(self.tokens_TLSE.shape[2])

    @cached_property
    def experts(self) -> int:
        """Number of experts of a layer, E."""
        return int(self.tokens_TLSE.shape[3])

    @property
    def identity(self) -> ModelIdentity:
        """Sizes and fingerprint that distinguish the profile's model from others."""
        sizes = (self.layers, self.experts, self.top_k, self.dispatch_bytes, self.expert_bytes)
        return ModelIdentity(self.model, self.fingerprint, *sizes)

    @property
    def load_LE(self) -> IntArray:
        """(L, E) int64: the tokens of each expert, over all windows and sources."""
        load_LE: IntArray = self.tokens_TLSE.sum(axis=(0, 2))
        return load_LE

    @property
    def required_routing(self) -> TokenRouting:
        """The token-level routing, `routing`.

        Raises:
            BadInput: if the profile has counts only.
        """
        if self.routing is None:
            remedy = "found counts alone; `aurora profile --tokens` keeps tokens"
            raise BadInput(f"profile of {self.model!r}: expected token-level routing, {remedy}")
        return self.routing

    def row_bytes(self, deduplicated: bool) -> int:
        """Bytes of one dispatched row: a (token, expert) pair or, if deduplicated, a token with its experts and their weights.

        Deduplicated, weights and expert numbers take 4 bytes each, and every part is aligned.
        """
        if not deduplicated or self.top_k == 1:
            return self.dispatch_bytes
        return sum(-(-part // ALIGNED_BYTES) for part in (self.dispatch_bytes, *(4 * self.top_k,) * 2)) * ALIGNED_BYTES

    @cached_property
    def digest(self) -> str:
        """The sha256 of all fields that planning reads; a plan stores it to recognise its profile."""
        return self._digest(curves=True)

    @cached_property
    def traffic_digest(self) -> str:
        """The sha256 of the fields of `digest` without the points of compute curves, which differ in each measurement."""
        return self._digest(curves=False)

    def _digest(self, curves: bool) -> str:
        sha = hashlib.sha256(self.tokens_TLSE.tobytes())
        sizes = (self.dispatch_bytes, self.combine_bytes, self.expert_bytes, self.other_bytes)
        sha.update(repr((self.model, self.fingerprint, self.tokens_TLSE.shape, self.top_k, sizes)).encode())
        for kind, phases in self.curves.items():
            for phase in (*PHASES, *({OVERHEAD} & set(phases))):
                sha.update(f"{kind} {phase}".encode())
                if curves:
                    sha.update(phases[phase].tokens_X.tobytes() + phases[phase].seconds_X.tobytes())
        if self.expert_groups != (1, 1):
            sha.update(repr(self.expert_groups).encode())
        if self.routing is not None:
            for array in (self.routing.experts_ULK, self.routing.source_U, self.routing.window_U):
                sha.update(array.tobytes())
        return sha.hexdigest()

    def seconds(self, phase: str, gpu: Gpu, tokens: ArrayLike, of: ArrayLike | None = None) -> FloatArray:
        """Returns the seconds of a phase on a GPU, in the shape of `tokens`.

        They are read from the curve of the GPU's kind or, if there is none, from that of the reference kind, divided by the
        GPU's speed.

        Args:
            phase: one of PHASES, or OVERHEAD, which takes zero seconds if the kind has no such curve.
            gpu: the GPU.
            tokens: token counts.
            of: number of tokens of all sources in the window of each count; counts are then averages over tokens that choose
                independently (`Curve.expected`), in steps of `step_tokens` tokens if set. None: `tokens` are the exact counts
                of one step.
        """
        curves = self.curves.get(gpu.kind)
        phases, speed = (next(iter(self.curves.values())), gpu.speed) if curves is None else (curves, 1.0)
        if phase == OVERHEAD and phase not in phases:
            return np.zeros(np.shape(tokens))
        if of is None:
            return phases[phase](tokens) / speed
        if self.step_tokens is None:
            return phases[phase].expected(tokens, of) / speed
        sizes, seconds = step_sizes(*self.step_tokens), np.zeros(np.broadcast_shapes(np.shape(tokens), np.shape(of)))
        for size in sizes:
            steps = np.maximum(np.asarray(of) / size, 1e-300)  # of a window without tokens
            seconds += steps * phases[phase].expected(np.asarray(tokens) / steps, size)
        return seconds / len(sizes) / speed


def _turn(window_U: IntArray, group_U: IntArray, sequence_U: IntArray | None) -> IntArray:
    """(U,) int64: the number of a token's prompt in its group or, where prompts are not known, of the token in its window."""
    turn_U = np.zeros(len(group_U), dtype=np.int64)
    for group in np.unique(group_U):
        at_X = np.flatnonzero(group_U == group)
        if sequence_U is not None:
            turn_U[at_X] = np.unique(sequence_U[at_X], return_inverse=True)[1]
            continue
        _, first_W, window_X = np.unique(window_U[at_X], return_index=True, return_inverse=True)
        turn_U[at_X] = np.arange(len(at_X)) - first_W[window_X]
    return turn_U


def step_sizes(least: int, most: int) -> list[int]:
    """Returns step sizes from `least` to `most` tokens, as a geometric sequence with a factor of at most two.

    Example:
        >>> step_sizes(16, 64), step_sizes(100, 100)
        ([16, 32, 64], [100])
    """
    return sorted({round(size) for size in np.geomspace(least, most, 1 + int(np.ceil(np.log2(most / least))))})


@dataclass(frozen=True, eq=False, repr=False)
class ComputeCurves(Value):
    """Compute curves of GPU kinds, measured for one model, to be added to its profiles.

    Attributes:
        model: the model's name.
        fingerprint: a hash of its router weights; empty if unknown.
        top_k: experts per token.
        row_bytes: bytes of one token's hidden state, to compare width and precision.
        expert_bytes: bytes of one expert's weights.
        kinds: by GPU kind, a Curve for each of PHASES, and for OVERHEAD if it was measured, as `curves` of Profile.
        provenance: notes by name on how each kind was measured.
    """

    model: str
    fingerprint: str
    top_k: int
    row_bytes: int
    expert_bytes: int
    kinds: CurvesByKind
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        what = f"curves of {self.model!r}"
        _check_curves(what, self.model, self.fingerprint, self.kinds)
        for name in ("top_k", "row_bytes", "expert_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BadInput(f"{what}: {name} must be a whole number above zero, found {value}")

    @overload
    def into(self, other: Profile) -> Profile: ...
    @overload
    def into(self, other: "ComputeCurves") -> "ComputeCurves": ...
    def into(self, other: "Profile | ComputeCurves") -> "Profile | ComputeCurves":
        """Returns `other` with these curves added, or replaced for GPU kinds that it has; its first kind stays the reference.

        Raises:
            BadInput: if `other` is of another model, or of the same model at another precision.
        """
        theirs = other.dispatch_bytes if isinstance(other, Profile) else other.row_bytes
        if not same_model(self.fingerprint, other.fingerprint):
            raise BadInput(f"curves of {self.model!r}: measured on other router weights than those of {other.model!r}")
        sizes = (self.top_k, self.row_bytes, self.expert_bytes)
        if sizes != (expected := (other.top_k, theirs, other.expert_bytes)):
            raise BadInput(
                f"curves of {self.model!r}: expected top-{expected[0]}, rows of {expected[1]} and experts of {expected[2]} "
                f"bytes, as {other.model!r} has, found top-{sizes[0]}, {sizes[1]} and {sizes[2]}: another model or another "
                "precision"
            )
        provenance = {**other.provenance, **self.provenance}
        if isinstance(other, Profile):
            return replace(other, curves={**other.curves, **self.kinds}, provenance=provenance)
        return replace(other, kinds={**other.kinds, **self.kinds}, provenance=provenance)
