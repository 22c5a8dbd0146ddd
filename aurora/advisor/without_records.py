"""Ways of serving compared without recorded experts: layouts and exchanges, over the imbalance of recorded models."""

from dataclasses import replace

from aurora.advisor.ratio_errors import differences, ratio_error
from aurora.advisor.served_ways import ComparedWay, WaysOfServing
from aurora.advisor.serving_case import MEDIAN, PERFECT, ServingCase


def without_records(served: WaysOfServing, case: ServingCase, ratios: tuple[float, float]) -> WaysOfServing:
    """Returns the ways that need no recorded experts: those whose experts are in sequence, or cut over GPUs.

    Their rates are those at the mean (geometric) imbalance of recorded models. Intervals cover the range of imbalance, and the
    error of such ratios. Perfect balance remains as the ceiling, with the range alone.

    Args:
        served: ways that were compared on drawn traffic.
        case: the model, its GPUs and its requests.
        ratios: least and most seconds of the slowest GPU's experts / seconds with perfect balance, over recorded models.
    """
    assert served.default.way is not None
    default, middle = served.default.way, (ratios[0] * ratios[1]) ** 0.5
    base = [case.service(default, (ratio, ratio)).tokens_per_s for ratio in (middle, *ratios)]

    def priced(other: ComparedWay) -> ComparedWay:
        error = ratio_error(case.kind, differences(other.way or default, default))
        each = tuple((ratio, ratio) if other.method == "linear" else PERFECT for ratio in (middle, *ratios))
        mine = [case.service(other.way or default, of_both) for of_both in each]
        gains = [service.tokens_per_s / rate for service, rate in zip(mine, base, strict=True)]
        paces = (0, 2) if other.way is not None and other.way.exchange != default.exchange else (MEDIAN, MEDIAN)
        ends = [case.service(other.way or default, of_both, pace=pace).tokens_per_s / rate
                for pace in paces for of_both, rate in zip(each, base, strict=True)]  # fmt: skip
        known = replace(other, service=mine[0], share=None, ratios=each)
        return replace(known, gain=gains[0], low=min(ends) / error, high=max(ends) * error)

    kept = [priced(other) for other in served.others if other.method in ("linear", "")]
    kept.sort(key=lambda other: -other.service.tokens_per_s)
    return replace(served, default=priced(served.default), ceiling=priced(served.ceiling), others=tuple(kept))
