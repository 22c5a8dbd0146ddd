"""One page of Prometheus metrics for all ranks: those of their servers, labelled by rank, and those of `aurora vllm` itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from aiohttp import ClientError, ClientSession, ClientTimeout, web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from aurora_vllm.serving_changes import ServingChanges

ANSWER_S = 2.0  # a rank that takes longer is left out of the page
RANK = "rank"  # the label


class MetricsPage(Collector):  # type: ignore[misc]
    """Metrics of all ranks.

    Args:
        texts: the page of each rank's server, by rank.
        changes: counts losses, starts and resumed streams.
    """

    def __init__(self, texts: Mapping[int, str], changes: ServingChanges) -> None:
        self._texts, self._changes = texts, changes

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of `aurora vllm`, and each of the servers' metrics with the samples of all ranks."""
        changes = self._changes
        yield GaugeMetricFamily("aurora_ranks", "Data-parallel ranks that the server was started with", len(changes.starts))
        yield GaugeMetricFamily("aurora_ranks_serving", "Data-parallel ranks that serve now", len(self._texts))
        yield CounterMetricFamily(
            "aurora_streams_resumed", "Streams that went on after a fault, once each time", changes.resumed
        )
        for name, text, count_R in (
            ("aurora_rank_losses", "How often a rank was lost", changes.losses),
            ("aurora_rank_starts", "How often a rank's server was started", changes.starts),
        ):
            family = CounterMetricFamily(name, text, labels=[RANK])
            for rank in changes.starts:
                family.add_metric([str(rank)], count_R[rank])
            yield family
        families: dict[str, Metric] = {}
        for rank, page in self._texts.items():
            found: list[Metric] = []
            with suppress(ValueError):  # what is no page of metrics is left out
                found = [*text_string_to_metric_families(page)]
            for one in found:
                together = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                together.samples += [sample._replace(labels=sample.labels | {RANK: str(rank)}) for sample in one.samples]
        yield from families.values()


def metrics_page(
    session: ClientSession, ranks: Callable[[], dict[int, str]], changes: ServingChanges
) -> Callable[[web.Request], object]:  # fmt: skip
    """Returns the handler of `/metrics` at the front port.

    Args:
        session: the HTTP client.
        ranks: returns the URLs of the serving ranks by rank.
        changes: as in MetricsPage.
    """

    async def text(url: str) -> str:
        try:
            async with session.get(f"{url}/metrics", timeout=ClientTimeout(total=ANSWER_S)) as answer:
                return await answer.text() if answer.status == 200 else ""
        except (ClientError, TimeoutError):
            return ""

    async def answer(_request: web.Request) -> web.Response:
        urls, registry = ranks(), CollectorRegistry()
        texts = dict(zip(urls, await asyncio.gather(*map(text, urls.values())), strict=True))
        registry.register(MetricsPage(texts, changes))
        page = await asyncio.to_thread(generate_latest, registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return answer
