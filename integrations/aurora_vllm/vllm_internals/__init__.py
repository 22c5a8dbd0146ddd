"""All code that depends on vLLM's internals. Tested with vLLM 0.32.

    hooks           hook where vLLM reads its options; the only one that is installed before anything is configured
    api_checks      check of vLLM's functions, classes, parameters and attributes that the plugin needs, by needed.toml
    replaced        replaces names of vLLM, those of replaced.toml alone, and checks that callers see it
    conditions      conditions of what settings ask for, checked by the first process and by workers
    worker          the worker that vLLM makes in place of its own (`worker_cls`): start, loading, passes, commands, end
    worker_startup  start of a worker between initialization and serving: patches, agreement of ranks, connection
    engine          the engine of a data-parallel rank
    patches         experts and all-to-all manager in place of vLLM's
    eplb_policy     the policy that vLLM's load balancer asks
    model_runner    beginning to serve a loaded model
    expert_moves    adaptation of the placement to traffic, through EPLB
    requests        the ranks of requests, and the steps in which ranks compute prompts
    fault_tolerance serving when ranks are lost or join, with close_group_connections and joining_rank
    local_stores    stores of ranks that listen on loopback

Without settings nothing is installed. With settings the first process sets vLLM's option `worker_cls`, and starts engines
through `engine`; everything else is installed in workers and engines when the settings ask for it.
"""
