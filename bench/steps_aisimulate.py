"""Steps by AISimulate (PyPI aisimulate), for `bench/steps.py --aisimulate PYTHON`: runs in the interpreter that has it.

Reads a JSON object per line (model, tp, dp, ep, steps), writes milliseconds or null. All ranks of data parallelism run the
same step. Its defaults: operations of vLLM's newest tables of B300.
"""

import json
import sys
from typing import Any


def model_of(row: dict[str, Any]) -> Any:
    """Returns the estimator of a row's configuration, or None if there is none."""
    from aisimulate_core.sdk.rust_engine_step import ForwardPassPerfModelConfig, RustForwardPassPerfModel

    experts = {"moe_tp_size": 1, "moe_ep_size": row["ep"]} if row["ep"] > 1 else {"moe_tp_size": row["tp"], "moe_ep_size": 1}
    sizes = {"tp": row["tp"], "attention_dp": row["dp"], "estimation_mode": "op_level", **(experts if row["experts"] else {})}
    config = ForwardPassPerfModelConfig(row["model"], "b300_sxm", "vllm", "aggregated", None, **sizes)
    try:
        return RustForwardPassPerfModel.best_available(config)
    except Exception as error:
        print(row["model"], sizes, error, file=sys.stderr)
        return None


def main() -> None:
    models: dict[tuple[Any, ...], Any] = {}
    for line in sys.stdin:
        row = json.loads(line)
        key = (row["model"], row["tp"], row["dp"], row["ep"])
        if key not in models:
            models[key] = model_of(row)
        total: float | None = None if models[key] is None else 0.0
        for prefill, decode, kv_tokens, prefill_kv, prompts in row["steps"]:
            if total is None:
                break
            earlier = prefill_kv if decode else kv_tokens
            scheduled = {"sum_prefill_tokens": prefill, "sum_prefill_kv_tokens": earlier, "num_decode_requests": decode}
            scheduled |= {"num_prefill_requests": prompts if prefill else 0, "sum_decode_kv_tokens": kv_tokens - earlier}
            total += models[key].estimate_forward_pass_time_ms([{"scheduled_requests": scheduled}] * row["dp"])
        print(json.dumps(total))


if __name__ == "__main__":
    main()
