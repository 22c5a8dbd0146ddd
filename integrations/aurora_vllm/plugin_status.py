"""What the plugin says of itself: whether it is engaged, and if not why, in the log and as a metric."""

import logging
import os

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, start_http_server

from aurora.errors import RankFailed
from aurora_vllm.settings import Settings

LOG = logging.getLogger("vllm.aurora")
WITHOUT_PLUGIN = "vLLM places experts and sends tokens as it would without the plugin"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # set by vLLM when it runs several API servers, or by the user
ENGAGED = "1 if the plugin does what its settings ask for; 0 if it does not, for the reason in the label"


class PluginStatus:
    """Whether the plugin is engaged in one rank, as the gauge `aurora_engaged` shows from the start.

    Args:
        settings: the plugin's settings.
        model_name: the name under which vLLM serves the model.
        rank: this expert-parallel rank.
        reports: whether this process logs what holds for all processes of the server.
        registry: where the gauge is registered; it is served at `metrics_port` if vLLM cannot show it.
    """

    def __init__(
        self, settings: Settings, model_name: str, rank: int, reports: bool, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._settings, self._reports, self._labels = settings, reports, (model_name, str(rank))
        self._falls_short = False
        self._gauge: Gauge | None = None
        try:
            names = ("model_name", "ep_rank", "reason")
            self._gauge = Gauge("aurora_engaged", ENGAGED, names, registry=registry, multiprocess_mode="mostrecent")
            if MULTIPROCESS not in os.environ and settings.metrics_port is not None:
                start_http_server(settings.metrics_port + rank, settings.metrics_host, registry)
        except (ValueError, OSError) as error:  # the name is taken in this process, or the port is
            LOG.warning("aurora: no metrics: %s", error)

    def engaged(self, how: str) -> None:
        """Says what serves by what, once in the log, and that the plugin is engaged unless it falls short.

        Args:
            how: what serves by what, as a part of a sentence.
        """
        if not self._falls_short:
            self._set(1, "")
        if self._reports:
            LOG.info("aurora: %s", how)

    def stands_aside(self, reason: str, report_here: bool | None = None) -> None:
        """Says that vLLM serves without the plugin; arguments and errors as in `falls_short`."""
        self.falls_short(reason, report_here, f"; {WITHOUT_PLUGIN}")

    def falls_short(self, reason: str, report_here: bool | None = None, consequence: str = "") -> None:
        """Says that the plugin does not do all that its settings ask for.

        Args:
            reason: why, and what it does not do.
            report_here: whether this rank is the one that logs it; None: the one that logs what holds for all.
            consequence: what vLLM does instead, the end of the sentence.

        Raises:
            RankFailed: if the settings say that the plugin is required.
        """
        self._falls_short = True
        self._set(0, reason)
        if self._settings.required:
            raise RankFailed(f'aurora: {reason}; the setting "required" ends a server that would serve without the plugin')
        reports = self._reports if report_here is None else report_here
        LOG.log(logging.WARNING if reports else logging.DEBUG, "aurora: %s%s", reason, consequence)

    def _set(self, value: int, reason: str) -> None:
        if self._gauge is not None:
            self._gauge.labels(*self._labels, reason).set(value)
