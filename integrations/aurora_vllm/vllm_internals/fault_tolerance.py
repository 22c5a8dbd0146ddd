"""Serving on when a data-parallel rank is lost: the instruction `scale_down` of vLLM's fault-tolerance framework.

Interface between the parent, which starts the servers and alone decides who is lost, and the survivors:

1. The parent starts the **keeper**: `python -m aurora_vllm.vllm_internals.fault_tolerance RANKS`, in the environment of vLLM. It
   holds the TCP store at which survivors meet, and vLLM's data-parallel coordinator, so that no rank is special. It prints one
   line on stdout once both are ready, {"store": "127.0.0.1:PORT"}, and ends when its stdin is closed, or on SIGTERM.
2. For each rank r of N the parent starts one server, in a process group of its own, so that `os.killpg(pid, SIGKILL)` cuts a rank
   off whole (server, engine, workers):

       vllm serve MODEL --data-parallel-size N --data-parallel-rank r --data-parallel-address 127.0.0.1
           --data-parallel-rpc-port PORT (equal for all) --port PORT_r --api-server-count 1
           --enable-expert-parallel --enable-eplb --eplb-config '{"num_redundant_experts": ...}' (or a plan, which sets it)
           --enable-fault-tolerance --fault-tolerance-config '{"engine_recovery_timeout_sec": 60}'
           --additional-config '{"aurora": {..., "fault_store": "127.0.0.1:PORT of the keeper"}}'

   `fault_store` (or AURORA_FAULT_STORE) turns all of this on. All servers must start: a loss before `/health` of every rank
   answers 200 ends the start, and the parent starts anew.
3. When ranks are lost, the parent kills their process groups, draws the next change number (1, 2, 3, ...; never again the same one),
   and posts to every survivor's server, idle or not, all at once:

       POST /fault_tolerance/apply
       {"instruction": "scale_down", "params": {"change": 1, "dead": [2], "alive": [0, 1, 3], "within_s": 20}}

   Ranks are numbered as at start, for ever: `dead` has all ranks that were lost since, `alive` the others; together they are
   0 ... N-1. `within_s` is how long survivors wait for each other. The answer is vLLM's: 202 {"request_id": ..., "message": ...}.
4. The parent polls `GET /fault_tolerance/status` of every survivor, {"engines": [{"id": r, "status": ..., "change": 1}], ...}:
   - status "healthy" and change 1: this survivor serves on. The change is done when all survivors say so.
   - "ft_error" with "last_ft_request_id" equal to the request_id: this survivor refused or failed, and says why (an older change
     number; an expert that nobody holds; other survivors that did not come). It still waits for a newer change.
   - "unhealthy": it waits for a change (its requests were aborted: HTTP 200, finish reason "abort"). "dead": it is lost.
   A rank lost during a change is a new change with a greater number, posted to those who are left; the older one is given up.
   Requests that come meanwhile wait, and are served after the change.
5. Fencing: an engine takes a change only once, and only one of a greater number than its last; one that finds itself in `dead`
   kills itself. Ranks that the parent has cut off have no connection to survivors, which have closed theirs.
6. The last survivor serves alone. With no survivor left, and whenever a change fails, the parent starts all servers anew.
"""
