"""Serving engines as they are: what each does by default and with each flag that matters for MoE models, a file each."""

from aurora.advisor.engines.engine import ServingEngine
from aurora.advisor.engines.sglang import SGLANG
from aurora.advisor.engines.trtllm import TRTLLM
from aurora.advisor.engines.vllm import VLLM
from aurora.advisor.engines.vllm_ascend import VLLM_ASCEND

SERVING_ENGINES: dict[str, ServingEngine] = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TRTLLM, "vllm-ascend": VLLM_ASCEND}
