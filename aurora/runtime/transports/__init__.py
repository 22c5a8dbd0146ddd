"""Transports between ranks; the interface is `aurora.moe.transport`.

- `ordered`: base of transports that keep an order by single messages, and the memory transport, for ranks that are threads
- `gloo`: TCP between processes; `shaped`: the same, slowed down to the rates of a cluster; `nccl`: GPUs
- `push`: GPUs write rows into peers' memory (`symmetric_memory`), in order; `put`: NCCL's one-sided calls
- `process_groups`: the torch.distributed groups that they run over
"""
