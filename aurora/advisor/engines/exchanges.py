"""Exchanges of tokens between experts' GPUs that serving engines have: what each sends, needs and takes."""

from dataclasses import dataclass

SENDS = {
    "reduce": "all GPUs hold the same tokens; their partial sums are added up",
    "gather": "every token goes to every GPU, and the sums come back",
    "route": "a token goes to the GPUs of its experts, and comes back from there",
    "balance": "a token goes where the step's own balance sends it; weights of replicas go before",
}


Pace = tuple[float, float, float]
AS_COMPUTED: Pace = (1.0, 1.0, 1.0)  # of exchanges whose constants are from their own times
UNKNOWN: Pace = (0.4, 1.0, 4.5)  # of exchanges whose times nobody published: the range of those that somebody did


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
        measured: reference for its published times; empty: none are known, and it is not recommended.
        paces: the least, the median and the most of published seconds / those that are computed from its bytes, for steps of
            prompts (from 1,024 tokens of a rank on) and of answers; where one is published, it is taken for both.
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
    measured: str = ""
    paces: tuple[Pace, Pace] = (UNKNOWN,) * 2

    @property
    def follows_placement(self) -> bool:
        """True if the bytes sent depend on the placement of experts. With "balance" neither bytes nor compute depend on it."""
        return self.sends == "route"


# fmt: off
LOW_LATENCY = ("deepep-ll", "uccl-ll", "nixl", "nccl-ep")  # exchanges with slots for the most tokens of all; sizes are DeepEP's
EXCHANGES = {
    "all-reduce": EngineExchange(
        "all GPUs hold the same tokens (attention is cut by tensor parallelism); their sums are added up", "reduce",
        source="vLLM config/parallel.py (use_all2all); SGLang arg_groups/parallel_hook.py",
        measured="AISimulate, aiconfigurator", paces=(AS_COMPUTED,) * 2),
    "allgather": EngineExchange(
        "allgather of all tokens, and reduce-scatter of the sums", "gather",
        source="vLLM all2all.py (AgRsAll2AllManager); SGLang layers/dp_attention.py (or an all-reduce)",
        measured="aiconfigurator (NCCL on H100)", paces=(AS_COMPUTED,) * 2),
    "deepep-ht": EngineExchange(
        "DeepEP's high-throughput (normal) kernels; between servers a token goes once to a server, and on by NVLink", "route",
        "server", graphs=False, processors=20 / 132, nvlink="server", needs="deep_ep, RDMA between servers",
        source="DeepEP README; vLLM v1/worker/ubatch_utils.py (SMs)",
        measured="aiconfigurator (H100), awsome-distributed-ai (B200)", paces=((1.0, 1.0, 1.4),) * 2),
    "deepep-ll": EngineExchange(
        "DeepEP's low-latency kernels: fixed slots for the most tokens of every GPU and expert", "route", "expert",
        needs="deep_ep, RDMA or NVLink", source="DeepEP README",
        measured="aiconfigurator (H100), DeepEP docs/legacy.md (H800)", paces=((0.9, 1.0, 1.2),) * 2),
    "uccl-ht": EngineExchange(
        "UCCL-EP's high-throughput kernels, a deep_ep whose rows CPUs send: over EFA too", "route", "server", graphs=False,
        processors=20 / 132, nvlink="server", needs="uccl.ep as deep_ep, RDMA or EFA between servers", maker="NVIDIA",
        source="UCCL ep/README.md, ep/bench/vllm",
        measured="UCCL ep/README.md (H200, B200), awsome-distributed-ai (B200)", paces=((1.0, 1.2, 4.5),) * 2),
    "uccl-ll": EngineExchange(
        "UCCL-EP's low-latency kernels, a deep_ep whose rows CPUs send: over EFA too", "route", "expert",
        needs="uccl.ep as deep_ep, RDMA or EFA between servers", maker="NVIDIA", source="UCCL ep/README.md, ep/bench/vllm",
        measured="UCCL ep/README.md (H200, B200, MI300X)", paces=((1.0, 1.9, 3.0),) * 2),
    "deepep": EngineExchange(
        "DeepEP: high-throughput kernels for prefill, low-latency kernels for decode", "route", "server",
        decode="deepep-ll", processors=20 / 132, nvlink="server", needs="deep_ep, RDMA between servers",
        source="SGLang arg_groups/fields/exec_.py",
        measured="as deepep-ht and deepep-ll", paces=((1.0, 1.0, 1.4),) * 2),
    "deepep-v2": EngineExchange(
        "DeepEP's ElasticBuffer, by NVLink and NCCL", "route", "server",
        nvlink="server", needs="deep_ep 2; SGLang: a registered model", source="vLLM all2all.py; SGLang moe_hook.py",
        measured="awsome-distributed-ai (B200)", paces=((1.0, 1.1, 1.2), (2.5, 2.8, 3.4))),
    "nixl": EngineExchange(
        "NIXL EP: low-latency kernels, GPUs may come and go", "route", "expert", needs="nixl_ep",
        source="vLLM all2all.py; NIXL examples/device/ep (nixl_ep_ll.cu, of DeepEP's)",
        measured="NIXL pull request 1751 (H100)", paces=((1.8, 2.0, 2.3),) * 2),
    "mori-ht": EngineExchange(
        "MoRI for throughput: between servers a token goes once to a server that it chose", "route", "server",
        needs="mori, ROCm", maker="AMD",
        source="vLLM all2all.py; MoRI dispatch_combine/internode_v1.cpp (DispatchInterNodeSend)",
        measured="MoRI README (MI300X)", paces=((1.1, 1.5, 2.1),) * 2),
    "mori-ll": EngineExchange(
        "MoRI for low latency: between servers every token goes once to every server", "route", "servers",
        needs="mori, ROCm", maker="AMD",
        source="vLLM all2all.py; MoRI dispatch_combine/internode_v1.cpp (DispatchInterNodeLLSend)",
        measured="MoRI README (MI300X)", paces=((1.6, 1.7, 1.7),) * 2),
    "nvlink-one-sided": EngineExchange(
        "a GPU writes into its peers' memory by NVLink; slots for the most tokens of every GPU", "route", nvlink="all",
        needs="vLLM, SGLang: FlashInfer", source="TensorRT-LLM communication/nvlink_one_sided.py",
        measured="FlashInfer pull request 3697 (GB200)", paces=((0.8, 0.9, 0.9), (0.4, 0.5, 0.7))),
    "nvlink-two-sided": EngineExchange(
        "sender and receiver copy together, by NVLink", "route", nvlink="all",
        needs="vLLM: FlashInfer", source="TensorRT-LLM communication/nvlink_two_sided.py"),
    "nccl-ep": EngineExchange(
        "NCCL EP's low-latency kernels, by NCCL's device API: a GPU gets a token once", "route",
        needs="NCCL 2.30.4, nccl4py", maker="NVIDIA", source="TensorRT-LLM communication/nccl_ep.py (pull request 15597)"),
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
