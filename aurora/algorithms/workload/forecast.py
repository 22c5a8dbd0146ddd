"""Forecast of one layer's traffic in future windows, of which recorded windows are a sample.

The forecast separates lasting properties of the recorded counts from sampling noise:

- The experts' shares are shrunk towards equal shares, by as much as chance alone would spread them (empirical Bayes).
- A domain's shares are shrunk towards the shares of all domains, by as much as they differ by chance. The same holds for
  windows of a few recurring kinds. If all windows differ, each is a random draw around the common shares.
- A source rank's volume, and its preference for experts, count as far as they recur in another quarter of the windows. With
  fewer windows neither counts, since a lasting difference cannot be told from a single prompt.
- Tokens of a prompt choose alike, so counts vary more than single tokens would (a design effect, measured between windows or,
  within a single window, between source ranks).

Traffic of another kind than all that was recorded cannot be forecast.
Source: Mosimann, "On the compound multinomial distribution" (1962); Kish, Survey Sampling (1965), for the design effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.algorithms.workload.load_statistics import shrunk_shares
from aurora.types import Profile
from aurora.types.arrays import FloatArray, IntArray

KINDS = 0.1  # mean square of the correlation of windows' shares above which they come in few kinds
QUARTERS = 4  # parts of all windows, in sequence; a prompt can be in two that touch, but hardly in others
FAR = ((0, 2), (0, 3), (1, 3))  # quarters that do not touch
FEW = 4  # windows; fewer cannot show whether they come in kinds, and count as if they did
MOST_CASES = 16  # windows above this number are grouped, those of similar size together


@dataclass(frozen=True)
class Forecast:
    """The expected traffic of one layer in each of W traffic cases (windows, groups of windows, or domains).

    Attributes:
        tokens_WS: (W, S) float64, (token, expert) pairs that each source rank sends.
        share_WE: (W, E) float64, the expected share of each expert.
        concentration_W: (W,) float64, concentration of the Dirichlet distribution from which the shares of a future window are
            drawn, with mean share_WE; the larger, the closer they are to it.
        affinity_SE: (S, E) float64, how often a source rank chooses an expert / how often the average rank does; 1: no
            preference.
        windows_W: (W,) int64, number of windows over which a case's tokens are spread.
    """

    tokens_WS: FloatArray
    share_WE: FloatArray
    concentration_W: FloatArray
    affinity_SE: FloatArray
    windows_W: IntArray

    @property
    def expected_WSE(self) -> FloatArray:
        """(W, S, E) float64, the expected pairs from each source rank to each expert."""
        return _dealt(self.tokens_WS, self.share_WE, self.affinity_SE)

    def draws(self, number: int, rng: np.random.Generator) -> tuple[FloatArray, IntArray]:
        """Draws future traffic cases, equally many from each of the W cases.

        Args:
            number: number of draws; rounded up to a multiple of W.
            rng: for the draws.

        Returns:
            (drawn_XSE, windows_X): (X, S, E) float64 pairs from each source rank to each expert; (X,) int64, the number of
            windows over which each draw is spread.
        """
        from_X = np.tile(np.arange(len(self.share_WE)), -(-number // len(self.share_WE)))
        gamma_XE = rng.standard_gamma(self.share_WE[from_X] * self.concentration_W[from_X, None])
        share_XE = gamma_XE / np.maximum(gamma_XE.sum(axis=1, keepdims=True), 1e-300)
        return _dealt(self.tokens_WS[from_X], share_XE, self.affinity_SE), self.windows_W[from_X]


def layer_forecast(profiles: Sequence[Profile], layer: int, summed: bool) -> Forecast:
    """Makes the forecast of one layer from recorded profiles.

    Args:
        profiles: one model's profile, whose windows (up to MOST_CASES, or groups of them) are the cases; or several of
            its profiles, domains, which are the cases.
        layer: index of the MoE layer.
        summed: whether all windows of all profiles together are one case.
    """
    recorded = [profile.tokens_TLSE[:, layer] for profile in profiles]
    if summed:
        return forecast([np.concatenate(recorded)], False)
    if len(recorded) > 1:
        return forecast(recorded, False)
    by_size_T = np.argsort(recorded[0].sum(axis=(1, 2)), kind="stable")
    groups = np.array_split(by_size_T, min(MOST_CASES, len(by_size_T)))
    return forecast([recorded[0][np.sort(group)] for group in groups], True, recorded[0])


def forecast(evidence_W: Sequence[IntArray], each_window: bool, recorded_TSE: IntArray | None = None) -> Forecast:
    """Makes the forecast of one layer from recorded windows, grouped into W traffic cases.

    Args:
        evidence_W: the recorded windows of each traffic case, (T, S, E) int64 (token, expert) pairs; T may differ.
        each_window: True: a case stands for one future window; False: for all of its windows together.
        recorded_TSE: (T, S, E) int64, all recorded windows in sequence; None: those of evidence_W.
    """
    count_WE = np.array([tokens_TSE.sum(axis=(0, 1)) for tokens_TSE in evidence_W], dtype=np.float64)
    total_W = count_WE.sum(axis=1)
    effect = _design_effect(evidence_W)
    all_E = shrunk_shares(count_WE.sum(axis=0), effect)
    sample_W = total_W / effect  # independent choices that tell as much
    spread = _spread(count_WE, all_E, effect)
    kept_W = spread * sample_W / (1 + spread * sample_W)  # how far a case's own shares are kept
    own_WE = np.where(total_W[:, None] > 0, count_WE / np.maximum(total_W, 1)[:, None], all_E)
    if each_window and not _in_kinds(own_WE, all_E, spread, sample_W):
        kept_W = np.zeros_like(kept_W)
    share_WE = kept_W[:, None] * own_WE + (1 - kept_W)[:, None] * all_E
    known = float((1 / (1 / np.maximum(sample_W, 1) + spread)).sum())  # independent choices behind the shares of all
    unsure_W = spread * (1 - kept_W) + (1 - kept_W) ** 2 / known
    if each_window:  # an unseen window is another draw of its kind; W windows differ from their mean by (W - 1) / W of that
        unsure_W = spread * (1 - kept_W + kept_W / len(count_WE)) + 1 / known
    windows_W = np.array([len(tokens_TSE) for tokens_TSE in evidence_W])
    divided_W = windows_W if each_window else np.ones_like(windows_W)
    every_TSE = np.concatenate(list(evidence_W)) if recorded_TSE is None else recorded_TSE
    return Forecast(
        (total_W / divided_W)[:, None] * _volumes(every_TSE.sum(axis=2)),
        share_WE,
        1 / (unsure_W + 1 / np.maximum(sample_W / divided_W, 1)),
        _affinity(every_TSE, all_E),
        windows_W // divided_W,
    )


def _dealt(tokens_WS: FloatArray, share_WE: FloatArray, affinity_SE: FloatArray) -> FloatArray:
    """(W, S, E) pairs: the tokens of each source rank, dealt to experts by their shares times its affinity."""
    if (affinity_SE == 1).all():
        return tokens_WS[:, :, None] * share_WE[:, None, :]
    weight_WSE = share_WE[:, None, :] * affinity_SE
    weight_WSE *= (tokens_WS / weight_WSE.sum(axis=2))[:, :, None]
    return weight_WSE


def _in_kinds(own_WE: FloatArray, all_E: FloatArray, spread: float, sample_W: FloatArray) -> bool:
    """Tells if windows differ in few ways that come again, not each in its own: their deviations are correlated."""
    windows, experts = own_WE.shape
    if windows < FEW or spread <= 0:
        return True
    apart_WE = (own_WE - all_E) / np.sqrt(all_E)
    product_WW = apart_WE @ apart_WE.T / (experts - 1)
    chance = 1 / np.maximum(sample_W, 1)
    squared = float((product_WW[~np.eye(windows, dtype=np.bool_)] ** 2).mean())
    by_chance = float(((spread + chance) ** 2).mean()) / (experts - 1) + spread**2 / (windows - 1) ** 2
    return bool(squared - by_chance > KINDS * spread**2)


def _volumes(tokens_TS: IntArray) -> FloatArray:
    """(S,) share of all tokens that each source rank sends: equal, but for what comes again in quarters that do not touch."""
    ranks = tokens_TS.shape[1]
    quarter_QS = np.array([quarter.sum(axis=0) for quarter in np.array_split(tokens_TS, QUARTERS)], dtype=np.float64)
    if not quarter_QS.sum(axis=1).all():
        return np.full(ranks, 1 / ranks)
    apart_QS = quarter_QS / quarter_QS.sum(axis=1, keepdims=True) - 1 / ranks
    mean_S = apart_QS.mean(axis=0)
    lasting = float(np.mean([(apart_QS[a] * apart_QS[b]).sum() for a, b in FAR]))
    measured = float((mean_S**2).sum())
    return np.asarray(1 / ranks + mean_S * (min(1.0, max(0.0, lasting / measured)) if measured > 0 else 0.0))


def _design_effect(evidence_W: Sequence[IntArray]) -> float:
    """By what factor counts vary more within a traffic case than independent choices would; 1 at least.

    Pearson's statistic between a case's windows or, if it has one, between source ranks, over its degrees of freedom.
    """
    statistic = freedom = 0.0
    for tokens_TSE in evidence_W:
        units_UE = tokens_TSE.sum(axis=1) if len(tokens_TSE) > 1 else tokens_TSE[0]
        units_UE = units_UE[units_UE.sum(axis=1) > 0].astype(np.float64)
        own_E = units_UE.sum(axis=0)
        if len(units_UE) < 2 or np.count_nonzero(own_E) < 2:
            continue
        statistic += _pearson(units_UE, own_E / own_E.sum())
        freedom += (len(units_UE) - 1) * (np.count_nonzero(own_E) - 1)
    return max(1.0, statistic / freedom) if freedom else 1.0


def _spread(count_WE: FloatArray, all_E: FloatArray, effect: float) -> float:
    """Returns the spread of the cases' true shares: their variance over a single choice's; 0 if chance explains it all."""
    total_W = count_WE.sum(axis=1)
    lever_W = 1 - total_W / max(total_W.sum(), 1)
    weight = float((total_W * lever_W).sum())
    used = np.count_nonzero(count_WE.sum(axis=0))
    if len(count_WE) < 2 or used < 2 or weight <= 0:
        return 0.0
    statistic = _pearson(count_WE[total_W > 0], all_E) / (used - 1)
    return max(0.0, (statistic - effect * float(lever_W.sum())) / weight)


def _affinity(tokens_TSE: IntArray, all_E: FloatArray) -> FloatArray:
    """(S, E) how much more often than others each source rank chooses an expert, as far as that comes again.

    The product of a rank's deviations in two quarters that do not touch has no bias, since their chance is independent.
    """
    quarter_QSE = np.array([quarter.sum(axis=0) for quarter in np.array_split(tokens_TSE, QUARTERS)], dtype=np.float64)
    total_QS = quarter_QSE.sum(axis=2)
    asked_S = (total_QS > 0).all(axis=0)
    alike_SE = np.ones(tokens_TSE.shape[1:])
    ranks = int(asked_S.sum())
    if ranks < 2 or len(all_E) < 2:
        return alike_SE
    share_QE = quarter_QSE.sum(axis=1) / total_QS.sum(axis=1, keepdims=True)
    apart_QSE = quarter_QSE[:, asked_S] / total_QS[:, asked_S, None] - share_QE[:, None, :]
    lasting = float(np.mean([(apart_QSE[a] * apart_QSE[b] / all_E).sum() for a, b in FAR])) / ranks / (len(all_E) - 1)
    spread = lasting / (1 - 1 / ranks)  # a rank is part of what it is compared with, which takes that part of it away
    if spread <= 0:
        return alike_SE
    total_S = total_QS.sum(axis=0)
    kept_S1 = (spread * total_S / (1 + spread * total_S))[:, None]
    own_SE = quarter_QSE.sum(axis=0) / np.maximum(total_S, 1)[:, None]
    return np.asarray(np.where(asked_S[:, None], kept_S1 * own_SE / all_E + 1 - kept_S1, alike_SE))


def _pearson(count_UE: FloatArray, share_E: FloatArray) -> float:
    """Pearson's statistic of counts (U, E), which are compared with the expected shares of each row's sum."""
    expected_UE = count_UE.sum(axis=1, keepdims=True) * share_E
    return float(
        np.divide((count_UE - expected_UE) ** 2, expected_UE, where=expected_UE > 0, out=np.zeros_like(expected_UE)).sum()
    )
