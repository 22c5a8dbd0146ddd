"""Statistics of the experts' loads: bootstrap intervals of bottlenecks, variation between samples, shrunk shares.

Tokens of a prompt choose similar experts, so resampling single tokens would give too narrow an interval. The bootstrap
resamples whole rounds of each source rank with replacement. A round is a prefill with the decoding that follows it; prompts of
different rounds are unrelated. If a profile has fewer than MIN_ROUNDS rounds, tokens are resampled, and the result says so.
Source: Efron & Tibshirani, An Introduction to the Bootstrap (1993), §8.3 (blocks), §13.3 (percentiles).
"""

from dataclasses import dataclass

import numpy as np

from aurora.types import Profile
from aurora.types.arrays import FloatArray, IntArray

LEVEL = 0.95
REPLICATES = 400
MIN_ROUNDS = 10


@dataclass(frozen=True)
class Interval:
    """A measured value with its confidence interval at LEVEL, from resampled "rounds" or "tokens"."""

    low: float
    value: float
    high: float
    drawn: str = ""

    @property
    def half_width(self) -> float:
        """Half of the interval divided by the value: 0.02 is plus or minus 2 %."""
        return (self.high - self.low) / 2 / self.value if self.value else 0.0


def bottleneck_interval(
    tokens_TLSE: IntArray,
    stage_T: tuple[str, ...] | None,
    split_LEG: FloatArray,
    rng: np.random.Generator,
    replicates: int = REPLICATES,
) -> Interval:
    """Computes the confidence interval of a placement's `bottleneck`, by the bootstrap.

    The largest of several noisy loads is biased upwards, and resampling adds to the bias. So the interval is reflected at the
    value (the "basic" bootstrap), which removes the bias.

    Args:
        tokens_TLSE: (T, L, S, E) int64, as Profile.tokens_TLSE.
        stage_T: (T,) "prefill" or "decode" of each window; None if unknown.
        split_LEG: (L, E, G) float64, the share of each expert's tokens that each GPU takes.
        rng: for resampling.
        replicates: number of resamples.
    """
    rounds_ULSE = rounds_of(tokens_TLSE, stage_T)
    few = len(rounds_ULSE) < MIN_ROUNDS
    drawn_BLE = (tokens_again if few else rounds_again)(rounds_ULSE, rng, replicates)
    value = float(bottleneck(_shares(rounds_ULSE.sum(axis=(0, 2)))[None], split_LEG)[0])
    under, over = np.quantile(bottleneck(_shares(drawn_BLE), split_LEG), ((1 - LEVEL) / 2, (1 + LEVEL) / 2)).tolist()
    low, high = max(2 * value - over, min(1.0, value)), max(2 * value - under, value)
    return Interval(low, value, high, "tokens" if few else "rounds")


def rounds_of(tokens_TLSE: IntArray, stage_T: tuple[str, ...] | None) -> IntArray:
    """Sums windows (T, ...) to rounds, each a prefill with the windows that follow it until the next prefill.

    stage_T: "prefill" or "decode" of each window; None if unknown, which makes every window a round.
    """
    if stage_T is None:
        return tokens_TLSE
    begins = [t for t, stage in enumerate(stage_T) if stage == "prefill" or t == 0]
    return np.add.reduceat(tokens_TLSE, begins, axis=0)


def rounds_again(rounds_ULSE: IntArray, rng: np.random.Generator, replicates: int) -> FloatArray:
    """Bootstraps rounds: returns (B, L, E) float64 tokens of B resamples, drawn with replacement per source rank."""
    rounds, layers, sources, experts = rounds_ULSE.shape
    load_BX = np.zeros((replicates, layers * experts))
    for source in range(sources):
        times_BU = rng.multinomial(rounds, np.full(rounds, 1 / rounds), size=replicates)
        load_BX += times_BU.astype(np.float64) @ rounds_ULSE[:, :, source].reshape(rounds, -1)
    return load_BX.reshape(replicates, layers, experts)


def tokens_again(rounds_ULSE: IntArray, rng: np.random.Generator, replicates: int) -> FloatArray:
    """Bootstraps tokens: returns (B, L, E) float64 tokens of B resamples, each drawn by the shares of its layer's experts.

    Every resample of a layer has as many tokens as the layer. rounds_ULSE is what `rounds_of` returns.
    """
    load_LE = rounds_ULSE.sum(axis=(0, 2))
    drawn_LBE = [
        rng.multinomial(int(load_E.sum()), share_E, size=replicates)
        for load_E, share_E in zip(load_LE, _shares(load_LE), strict=True)
    ]
    return np.stack(drawn_LBE, axis=1).astype(np.float64)


def bottleneck(share_BLE: FloatArray, split_LEG: FloatArray) -> FloatArray:
    """Returns (B,) the most loaded GPU's load / the mean over all GPUs, averaged over layers.

    Args:
        share_BLE: (B, L, E) each expert's share of its layer's tokens, in B samples.
        split_LEG: (L, E, G) the share of each expert's tokens that each GPU takes.
    """
    load_BLG = np.einsum("ble,leg->blg", share_BLE, split_LEG, optimize=True)
    fullest_B: FloatArray = load_BLG.max(axis=2).mean(axis=1) * split_LEG.shape[2]
    return fullest_B


def _shares(load_XE: IntArray | FloatArray) -> FloatArray:
    """Each entry divided by the sum along the last axis; equal shares where the sum is zero."""
    sum_X1 = load_XE.sum(axis=-1, keepdims=True)
    alike = np.full(load_XE.shape, 1 / load_XE.shape[-1])
    np.divide(load_XE, sum_X1, out=alike, where=sum_X1 > 0)
    return alike


def variation(load_XE: IntArray | FloatArray, other_XE: IntArray | FloatArray) -> FloatArray:
    """Returns (X,) the total variation distance between the experts' shares in rows of load_XE and of other_XE.

    0: equal shares; 1: no expert in common. It is 0 if a row has no loads.
    """
    sum_X1, other_X1 = (np.maximum(loads.sum(axis=-1, keepdims=True), 1) for loads in (load_XE, other_XE))
    apart_X: FloatArray = np.abs(load_XE / sum_X1 - other_XE / other_X1).sum(axis=-1) / 2
    return np.where((load_XE.sum(axis=-1) > 0) & (other_XE.sum(axis=-1) > 0), apart_X, 0.0)


def variation_by_chance(
    load_LE: IntArray | FloatArray, other_LE: IntArray | FloatArray, rng: np.random.Generator, replicates: int
) -> FloatArray:
    """Draws the `variation` that chance alone causes between two samples of the same traffic, token by token.

    Args:
        load_LE, other_LE: (L, E), tokens by layer and expert. Two samples, of as many tokens as each table has, are drawn from
            the sum of the tables.
        rng: for the samples.
        replicates: number of draws.

    Returns:
        (B, L) float64, the `variation` of each draw.
    """
    share_LE = _shares(load_LE + other_LE)
    size = replicates, len(share_LE)
    drawn_BLE, other_BLE = (rng.multinomial(load.sum(axis=1).astype(np.int64), share_LE, size) for load in (load_LE, other_LE))
    return variation(drawn_BLE, other_BLE)


def contiguous_interval(profile: Profile, seed: int = 0) -> Interval:
    """Computes `bottleneck_interval` of a profile under `contiguous_split`, experts placed by index."""
    from aurora.algorithms.workload.traffic import contiguous_split  # loads estimates of rows, which a worker does not need

    split_EG = contiguous_split(profile.experts, profile.sources)
    split_LEG = np.broadcast_to(split_EG, (profile.layers, *split_EG.shape))
    return bottleneck_interval(profile.tokens_TLSE, profile.stage_T, split_LEG, np.random.default_rng(seed))


LEAST_PRIOR = 0.5  # pairs that every expert is given before counting, at least (Jeffreys)


def shrunk_shares(count_XE: FloatArray, effect: float) -> FloatArray:
    """Returns the experts' shares in counts, shrunk towards equal shares by a symmetric Dirichlet prior fitted to the counts.

    Args:
        count_XE: (E,) or (X, E) float64, how often each expert was chosen; each row is shrunk by itself.
        effect: variance of the counts / their variance if choices were independent (design effect).
    """
    experts, total_X1 = count_XE.shape[-1], np.maximum(count_XE.sum(axis=-1, keepdims=True), 1.0)
    squares_X1 = ((count_XE / total_X1 - 1 / experts) ** 2).mean(axis=-1, keepdims=True)
    variance_X1, most = squares_X1 - effect / (experts * total_X1), (1 - 1 / experts) / experts
    varied_X1 = variance_X1 > most / total_X1
    fitted_X1 = (most / np.where(varied_X1, variance_X1, 1.0) - 1) / experts
    counted_XE = count_XE / effect + np.where(varied_X1, np.maximum(fitted_X1, LEAST_PRIOR), total_X1 / experts)
    return np.asarray(counted_XE / counted_XE.sum(axis=-1, keepdims=True))
