"""Ways of serving compared without recorded experts: layouts and exchanges, over the imbalance of recorded models."""

from dataclasses import replace

from aurora.advisor.served_ways import ComparedWay, WaysOfServing
from aurora.advisor.serving_case import PERFECT, Service, ServingCase


def without_records(served: WaysOfServing, case: ServingCase, ratios: tuple[float, float]) -> WaysOfServing:
    """Returns the ways that need no recorded experts: those whose experts are in sequence, or cut over GPUs.

    Their rates are those at the mean (geometric) imbalance of recorded models. Intervals cover the range of imbalance, and the
    error of computed steps. Perfect balance remains as the ceiling, with the range alone.

    Args:
        served: ways that were compared on drawn traffic.
        case: the model, its GPUs and its requests.
        ratios: least and most seconds of the slowest GPU's experts / seconds with perfect balance, over recorded models.
    """
    assert served.default.way is not None
    default, middle = served.default.way, (ratios[0] * ratios[1]) ** 0.5

    def service(other: ComparedWay, ratio: float) -> Service:
        return case.service(other.way or default, (ratio, ratio) if other.method == "linear" else PERFECT)

    def priced(other: ComparedWay, error: float) -> ComparedWay:
        low, gain, high = sorted(
            service(other, ratio).tokens_per_s / service(served.default, ratio).tokens_per_s for ratio in (*ratios, middle)
        )
        known = replace(other, service=service(other, middle), share=None)
        return replace(known, gain=gain, low=low / error, high=high * error)

    kept = [priced(other, served.error) for other in served.others if other.method in ("linear", "")]
    kept.sort(key=lambda other: -other.service.tokens_per_s)
    return replace(served, default=priced(served.default, 1.0), ceiling=priced(served.ceiling, 1.0), others=tuple(kept))
