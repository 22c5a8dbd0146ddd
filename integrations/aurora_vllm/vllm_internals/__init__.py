"""All code that depends on vLLM's internals. Tested with vLLM 0.32.

    hooks           hooks where vLLM reads its options and where a worker starts; installed before anything is configured
    api_checks      check of vLLM's internal functions, classes and parameters that the plugin needs, by needed.toml
    conditions      conditions of what settings ask for, checked by the first process and by workers
    worker_startup  start of a worker between initialization and serving: patches, agreement of ranks, connection
    patches         replacements of vLLM's classes: experts, all-to-all manager
    eplb_policy     the policy that vLLM's load balancer asks
    model_runner    wrappers of a worker's model runner: forward passes, loading, commands
    expert_moves    adaptation of the placement to traffic, through EPLB
    requests        the ranks of requests, and the steps in which ranks compute prompts
    fault_tolerance serving when ranks are lost or join, with close_group_connections and joining_rank
    local_stores    stores of ranks that listen on loopback
    cpu             additions that vLLM needs for expert parallelism on CPUs

The hook wraps `WorkerWrapperBase.init_device`, which every worker calls when its configuration is known and before
communicators and model are built. Everything else is installed when the settings ask for it.
"""
