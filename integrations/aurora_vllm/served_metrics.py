"""The plugin's Prometheus metrics, in one table; and their way to vLLM's /metrics.

All processes share them by prometheus_client's multiprocess mode. With several API servers vLLM switches it on and collects.
With one, the plugin switches it on in the other processes, and that server shows their metrics beside its own.
"""

import atexit
import logging
import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.multiprocess import MultiProcessCollector

from aurora_vllm.rank_progress import FOLDER
from aurora_vllm.settings import SHARED_FOLDER

if TYPE_CHECKING:
    from aurora_vllm.prompt_steps import IntervalChanges

LOG = logging.getLogger("vllm.aurora")
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # set by vLLM when it runs several API servers, or by the user
BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
METRICS: dict[str, dict[str, tuple[Any, ...]]] = {  # by subject, and name without "aurora_": kind, help and further labels
    "the plugin": {
        "engaged": (Gauge, "1 if the plugin does what its settings ask for; 0 if not, for the reason in the label", "reason"),
    },
    "the watchdog": {
        "stuck_rank": (Gauge, "1 while others wait for this rank, for the reason; 0 when that is over", "cause", "reason"),
        "watchdog_timestamp_seconds": (Gauge, "When this rank's watchdog last looked at the ranks of its host, in Unix time"),
    },
    "all-to-alls": {
        "exchange_bytes": (Counter, "Bytes sent to other ranks in all-to-alls", "phase"),
        "exchange_seconds": (Counter, "Seconds spent in all-to-alls, waiting for others included", "phase"),
        "exchange_duration_seconds": (Histogram, "Seconds of one all-to-all, waiting for others included", "phase"),
        "exchange_bound_seconds": (Counter, "Below any all-to-all of these sizes at the plan's rates", "phase"),
        "exchange_gap": (Gauge, "Seconds over bound, minus one", "phase"),
        "layer_tokens": (Counter, "Tokens that this rank's experts computed, counted once for each chosen expert", "layer"),
        "expert_balancedness": (Gauge, "Mean over max tokens of GPUs, passes weighed by the busiest; 1 is balanced", "layer"),
        "plan_timestamp_seconds": (Gauge, "When the plan's file was written, in Unix time"),
        "plan_drift": (Gauge, "Part of recorded traffic at other experts than in the plan's profile, beyond chance, 0 to 1"),
        "plan_drift_chance": (Gauge, "Part by which two samples as small as these differ in less than 5 % of cases by chance"),
        "plan_drift_tokens": (Gauge, "Recorded tokens behind the drift, counted once for each chosen expert in each layer"),
        "record_failures": (Counter, "Records that could not be written and have ended"),
    },
    "the placement": {
        "control_heartbeat_timestamp_seconds": (Gauge, "When what moves experts was last seen well, in Unix time"),
        "control_failures": (Counter, "Windows in which an error left the experts where they were"),
        "control_balancedness": (Gauge, "Mean over largest load of the GPUs in the last window, all layers: 1 is balanced"),
        "control_expected_balancedness": (Gauge, "The same as expected in the next window, after the moves decided on"),
        "control_changed_timestamp_seconds": (Gauge, "When the placement last changed, or serving began, in Unix time"),
        "control_decisions": (Counter, "Decisions after windows of traffic, by kind", "kind"),
        "control_moved_bytes": (Counter, "Bytes of expert weights that were moved between ranks"),
        "control_move_seconds": (Counter, "Seconds in which expert weights were moved"),
    },
    "the requests": {
        "prompt_interval": (Gauge, "Steps from one in which prompts are computed to the next"),
        "prompts_held": (Counter, "Prompts that waited for a step in which prompts are computed"),
        "prompts_held_seconds": (Counter, "Seconds that these prompts waited"),
        "busiest_rank_tokens": (Counter, "Tokens of each step's busiest rank, which all ranks wait for"),
        "mean_rank_tokens": (
            Counter,
            "Mean tokens of the ranks of each step; over it, the busiest rank's are 1 if ranks are even",
        ),
    },
}


class RankMetrics:
    """The metrics of one subject, as one rank sets them. If `registry` already has metrics of these names, none is exported.

    Args:
        subject: key in METRICS.
        model_name: the name under which vLLM serves the model; a label of all metrics, as in vLLM.
        rank: this expert-parallel rank; exported as label `ep_rank`.
        registry: Prometheus registry for the metrics.
    """

    def __init__(self, subject: str, model_name: str, rank: int, registry: CollectorRegistry) -> None:
        share_metrics()
        self._labels = {"model_name": model_name, "ep_rank": str(rank)}
        try:
            self._families = self._registered(subject, registry)
        except ValueError as error:
            LOG.warning("aurora: no metrics of %s: %s", subject, error)
            self._families = self._registered(subject, CollectorRegistry())

    def _registered(self, subject: str, registry: CollectorRegistry) -> dict[str, Any]:
        options: dict[Any, dict[str, Any]] = {Gauge: {"multiprocess_mode": "mostrecent"}, Histogram: {"buckets": BUCKETS_S}}
        return {
            name: kind(f"aurora_{name}", text, (*self._labels, *further), registry=registry, **options.get(kind, {}))
            for name, (kind, text, *further) in METRICS[subject].items()
        }

    def of(self, name: str, **labels: str) -> Any:
        """Returns the metric with this name in METRICS, for this rank and the further labels."""
        return self._families[name].labels(**self._labels | labels)


class PromptMetrics:
    """Metrics of the steps in which a rank computes prompts; on rank 0 also of the tokens of all ranks.

    Args:
        model_name, rank, registry: as in `RankMetrics`.
    """

    def __init__(self, model_name: str, rank: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._metrics = RankMetrics("the requests", model_name, rank, registry)
        self._shown: dict[str, float] = {}

    def show(self, changes: "IntervalChanges") -> None:
        """Exports the present values."""
        steps, planner = changes.steps, changes.planner
        values = {"prompts_held": steps.held, "prompts_held_seconds": steps.held_s}
        if planner is not None:
            values |= {"busiest_rank_tokens": planner.busiest, "mean_rank_tokens": planner.mean}
        for name, value in values.items():
            self._metrics.of(name).inc(value - self._shown.get(name, 0.0))
        self._shown = values
        self._metrics.of("prompt_interval").set(changes.plan[0])


_creator: int | None = None  # the process that has opened the status folder, and shows the metrics of all others


def open_status_folder() -> None:
    """Creates this server's status folder, once, and exports the metrics that child processes write there."""
    global _creator
    if FOLDER in os.environ:
        return
    try:
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="aurora-vllm-", dir=os.environ.get(SHARED_FOLDER))
    except OSError as error:
        LOG.warning("aurora: no watchdog, and no metrics with one API server: %s", error)
        return
    _creator = os.getpid()
    atexit.register(_remove, folder, _creator)
    if not vllm_collects():
        MultiProcessCollector(REGISTRY, folder)


def vllm_collects() -> bool:
    """Returns whether vLLM itself, or the user, has chosen a folder in which all processes share their metrics."""
    return os.environ.get(MULTIPROCESS) not in (None, os.environ.get(FOLDER))


def share_metrics() -> None:
    """Lets this process write the metrics that it makes from now on to the status folder, unless it shows them itself."""
    folder = os.environ.get(FOLDER)
    if folder is not None and MULTIPROCESS not in os.environ and _creator != os.getpid():
        os.environ[MULTIPROCESS] = folder
        values.ValueClass = values.MultiProcessValue()  # which is chosen when prometheus_client is imported, in the parent


def _remove(folder: str, creator: int) -> None:
    """Removes the folder, unless this process is a fork of its creator."""
    if os.getpid() == creator:
        shutil.rmtree(folder, ignore_errors=True)
