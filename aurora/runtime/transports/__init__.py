"""Transports between ranks; the interface is `aurora.moe.transport`.

- `ordered`: an order held by messages, and its back end for ranks that are threads
- `gloo`: TCP between processes, also held to the rates of a cluster; `nccl`: GPUs
- `push`: rows written into peers' `symmetric_memory` on GPUs, in order; `put`: NCCL's one-sided calls
- `process_groups`: the torch.distributed groups that they run over
"""
