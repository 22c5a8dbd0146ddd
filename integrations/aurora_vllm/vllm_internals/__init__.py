"""All that knows vLLM's internals. Tried with vLLM 0.32.

    hooks           where vLLM reads its options, and where a worker starts: installed before anything is configured
    api_checks      which of vLLM's functions and classes must exist, with which parameters
    worker_startup  what a worker does between its initialization and serving: patches, agreement of ranks, connection
    patches         what replaces vLLM's classes: experts, all-to-all manager, EPLB policy
    model_runner    what wraps a worker's model runner: forward passes, loading, commands
    progress_hooks  where the watchdog sees that ranks wait for each other, beside all-to-alls
    expert_moves    how experts follow the traffic, through EPLB or by expert maps
    fault_tolerance serving on when ranks are lost or join, with group_connections, joining_rank and reread_experts
    cpu             what vLLM lacks for expert parallelism on CPUs

The hook wraps `WorkerWrapperBase.init_device`, which every worker calls when its configuration is known and before
communicators and model are built. Everything else is installed when the settings ask for it. What needs numba is imported
then too, because vLLM's earlier search for Triton kernels fails once llvmlite is loaded.
"""
