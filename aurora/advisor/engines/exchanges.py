"""Exchanges of tokens between experts' GPUs that serving engines have: what each sends, needs and takes."""

from dataclasses import dataclass

SENDS = {
    "reduce": "all GPUs hold the same tokens; their partial sums are added up",
    "gather": "every token goes to every GPU, and the sums come back",
    "route": "a token goes to the GPUs of its experts, and comes back from there",
    "balance": "a token goes where the step's own balance sends it; weights of replicas go before",
}


@dataclass(frozen=True)
class EngineExchange:
    """An implementation of dispatch and combine in engines, such as DeepEP; EXCHANGES has them by name.

    Attributes:
        about: description for users.
        sends: one of SENDS.
        once_per: a token is sent once to each "expert", "gpu" or "server" (and there to the GPUs) that it needs; "servers": to
            every server, whether it needs it or not.
        decode: name of another exchange that is used in steps without prompts; empty: this one.
        graphs: whether decode steps run as CUDA graphs.
        processors: part of a GPU's multiprocessors that its kernels occupy while the other half of a batch computes.
        nvlink: the GPUs that must be connected by NVLink: "" (none), "server" (those of a server) or "all".
        needs: required software or hardware; empty: none.
        maker: first word of the names of GPU kinds that support it; empty: all kinds.
        source: reference for this description.
    """

    about: str
    sends: str
    once_per: str = "gpu"
    decode: str = ""
    graphs: bool = True
    processors: float = 0.0
    nvlink: str = ""
    needs: str = ""
    maker: str = ""
    source: str = ""

    @property
    def follows_placement(self) -> bool:
        """True if the bytes sent depend on the placement of experts. With "balance" neither bytes nor compute depend on it."""
        return self.sends == "route"


# fmt: off
EXCHANGES = {
    "all-reduce": EngineExchange(
        "all GPUs hold the same tokens (attention is cut by tensor parallelism); their sums are added up", "reduce",
        source="vLLM config/parallel.py (use_all2all); SGLang arg_groups/parallel_hook.py"),
    "allgather": EngineExchange(
        "allgather of all tokens, and reduce-scatter of the sums, by NCCL", "gather",
        source="vLLM all2all.py (AgRsAll2AllManager); SGLang layers/dp_attention.py (or an all-reduce)"),
    "deepep-ht": EngineExchange(
        "DeepEP's high-throughput (normal) kernels; between servers a token goes once to a server, and on by NVLink", "route",
        "server", graphs=False, processors=20 / 132, nvlink="server", needs="deep_ep, RDMA between servers",
        source="DeepEP README; vLLM v1/worker/ubatch_utils.py (SMs)"),
    "deepep-ll": EngineExchange(
        "DeepEP's low-latency kernels: fixed slots for the most tokens of every GPU and expert", "route", "expert",
        needs="deep_ep, RDMA or NVLink", source="DeepEP README"),
    "deepep": EngineExchange(
        "DeepEP: high-throughput kernels for prefill, low-latency kernels for decode", "route", "server",
        decode="deepep-ll", processors=20 / 132, nvlink="server", needs="deep_ep, RDMA between servers",
        source="SGLang arg_groups/fields/exec_.py"),
    "deepep-v2": EngineExchange(
        "DeepEP's ElasticBuffer, by NVLink and NCCL", "route", "server",
        nvlink="server", needs="deep_ep 2; SGLang: a registered model", source="vLLM all2all.py; SGLang moe_hook.py"),
    "nixl": EngineExchange(
        "NIXL EP: low-latency kernels, GPUs may come and go", "route", "expert", needs="nixl_ep",
        source="vLLM all2all.py; NIXL examples/device/ep (nixl_ep_ll.cu, of DeepEP's)"),
    "mori-ht": EngineExchange(
        "MoRI for throughput: between servers a token goes once to a server that it chose", "route", "server",
        needs="mori, ROCm", maker="AMD",
        source="vLLM all2all.py; MoRI dispatch_combine/internode_v1.cpp (DispatchInterNodeSend)"),
    "mori-ll": EngineExchange(
        "MoRI for low latency: between servers every token goes once to every server", "route", "servers",
        needs="mori, ROCm", maker="AMD",
        source="vLLM all2all.py; MoRI dispatch_combine/internode_v1.cpp (DispatchInterNodeLLSend)"),
    "nvlink-one-sided": EngineExchange(
        "a GPU writes into its peers' memory by NVLink; slots for the most tokens of every GPU", "route", nvlink="all",
        needs="vLLM, SGLang: FlashInfer", source="TensorRT-LLM communication/nvlink_one_sided.py"),
    "nvlink-two-sided": EngineExchange(
        "sender and receiver copy together, by NVLink", "route", nvlink="all",
        needs="vLLM: FlashInfer", source="TensorRT-LLM communication/nvlink_two_sided.py"),
    "moonep": EngineExchange(
        "MoonEP balances every step: all GPUs compute equally many rows, weights of replicas go before", "balance", "expert",
        graphs=False, nvlink="all", needs="moonep, NVSwitch, BF16", source="vLLM all2all.py (MoonEPAll2AllManager)"),
    "mc2": EngineExchange(
        "fused dispatch and combine; batches above its capacity by HCCL's all-to-all (A2: an allgather)", "route", "expert",
        needs="Atlas A2 from 16 devices on, A3, 950", source="vllm-ascend ascend_forward_context.py"),
    "fused-mc2": EngineExchange(
        "as mc2, fused with the experts", "route", "expert",
        needs="Atlas A3, at most 32 devices (mega_moe: 64)", source="vllm-ascend ascend_forward_context.py"),
}
# fmt: on
