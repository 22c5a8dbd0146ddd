#!/usr/bin/env bash
# Checks on the GPUs of this machine: `bash bench/gpu/run.sh [--dry] [-o FOLDER] [CHECK...]`, in an environment with `aurora-moe[run,report]`.
#
# Models, profiles, clusters and plans are made here. One line a check: PASS, FAIL or SKIP, its seconds, why. FOLDER (gpu-DATE) has a log
# of each, what it wrote, and results.json. Without CHECKs all of them; the exit code is 1 if one failed. --dry does the same on
# CPUs: gloo in place of NCCL, Triton's interpreter in place of kernels, and no vLLM.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dry= folder=
while [ $# -gt 0 ]; do
    case $1 in
        --dry) dry=yes ;;
        -o) folder=$2; shift ;;
        -*) echo "run.sh: expected --dry, -o FOLDER or names of checks, found $1" >&2; exit 2 ;;
        *) break ;;
    esac
    shift
done
gpus=$(python -c 'import torch; print(torch.cuda.device_count() if torch.version.cuda else -1)') || exit 2
if [ -z "$dry" ] && [ "$gpus" -lt 1 ]; then
    echo "run.sh: expected a CUDA build of torch and a GPU, found $([ "$gpus" = -1 ] && echo 'a CPU build' || echo 'no GPU'); --dry needs neither" >&2
    exit 2
fi
mkdir -p "${folder:=gpu-$(date -u +%F)}" && folder=$(cd "$folder" && pwd) && cd "$folder" || exit 2
export PYTHONPATH=$root:$root/integrations${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
ranks=${dry:+2}
ranks=${ranks:-$gpus}
transport=$([ -n "$dry" ] && echo gloo || echo nccl)
mixtral=$root/profiles/models/mixtral-topics qwen=$root/profiles/models/qwen3moe-stdlib
results=() failed=0

aurora() { python -m aurora "$@"; }
run() { aurora run "$1" --transport "$transport" --prompts prompts.txt --max-new-tokens "${tokens:-16}" "${@:2}"; }
many() { [ "$ranks" -ge "${1:-2}" ] || { echo "needs ${1:-2} GPUs, here are $ranks"; exit 77; }; }  # 77: skipped
gpu() { [ -z "$dry" ] || { echo "needs a GPU"; exit 77; }; }

# rank_of PID: a rank's process of the run with this process id, drawn from those there are within two minutes.
rank_of() {
    local server pids until=$((SECONDS + 120))
    while [ $SECONDS -lt $until ]; do
        for server in $(pgrep -P "$1" -f multiprocessing.forkserver); do
            pids=$(pgrep -P "$server")
            [ "$(wc -w <<<"$pids")" -ge "$ranks" ] && shuf -n 1 <<<"$pids" && return
        done
        sleep 0.2
    done
    return 1
}

# lose SIGNAL SECONDS COMMAND...: runs the command, and sends the signal to one of its ranks so many seconds after all are there.
lose() {
    local signal=$1 seconds=$2 pid
    shift 2
    python -m aurora "$@" &
    pid=$!
    trap "kill $pid 2>/dev/null" EXIT
    rank=$(rank_of $pid) && sleep "$seconds" && kill "-$signal" "$rank"
    wait $pid
    local status=$?
    [ "$signal" = STOP ] && kill -KILL "$rank" 2>/dev/null
    return $status
}

# What the checks are made of. A cluster of this machine's ranks, with rates as measured where there are several.
check_inputs() {
    printf 'import os\nThe statement\nA list is\nclass Shape:\n%.0s' 1 2 3 4 >prompts.txt
    if [ "$ranks" -gt 1 ]; then
        aurora measure links --ranks "$ranks" --transport "$transport" -o cluster.toml || return
    else
        aurora measure devices -o cluster.toml || return
    fi
    aurora profile "$mixtral" --text "$root/LICENSE" "$root/README.md" --sources "$ranks" --limit 32 -o a.npz &&
        aurora profile "$qwen" --text "$root/tests/conftest.py" --sources "$ranks" --limit 32 -o b.npz &&
        aurora plan --cluster cluster.toml --profile a.npz -o a.json &&
        aurora plan --cluster cluster.toml --profile a.npz --profile b.npz -o ab.json
}
check_kernels() {
    [ -z "$dry" ] && { python "$root/bench/gpu/dispatch_kernels.py"; return; }
    (cd "$root" && python -m pytest -q -p no:cacheprovider tests/moe -k "triton or compiles")
}
check_stages() { many; python -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$root/bench/gpu/stages.py" ${dry:+--smoke}; }
check_links_under_torchrun() { many; timeout 300 python -m torch.distributed.run --standalone --nproc-per-node "$ranks" --no-python aurora measure links --transport "$transport" -o links.toml; }
check_answers() { run a.json --model "$mixtral" --verify; }
check_deduplicated() { run a.json --model "$mixtral" --verify --deduplicate; }
check_order_by_measurement() { many; run a.json --model "$mixtral" --verify --orders auto; }
check_order_held() {
    many
    aurora plan --cluster cluster.toml --profile a.npz --order matchings -o held.json && run held.json --model "$mixtral" --verify --trace held.npz
}
check_prediction() { run a.json --model "$mixtral" --compare; }
check_phases_by_events() { run a.json --model "$mixtral" --trace phases.npz && aurora report a.json phases.npz --format perfetto -o phases.json; }
check_two_models() { run ab.json --model "$mixtral" --model "$qwen" --verify --interleave on && run ab.json --model "$mixtral" --model "$qwen" --verify --interleave off; }
check_time_slices_by_layer() {
    aurora plan --cluster cluster.toml --profile a.npz --profile b.npz --time-slice layer -o layer.json && run layer.json --model "$mixtral" --model "$qwen" --verify
}
check_two_processes() {
    aurora plan --cluster cluster.toml --profile b.npz -o b.json || return
    run a.json --model "$mixtral" --verify --interleave processes --gpu-group "gpu-$$" --trace one.npz &
    run b.json --model "$qwen" --verify --interleave processes --gpu-group "gpu-$$" --trace other.npz && wait $!
}
check_experts_follow() { many; tokens=64 run a.json --model "$mixtral" --verify --adapt --period-s 1 --loss 0; }
check_lost_rank_is_named() {
    many
    lose KILL 1 run a.json --model "$mixtral" --transport "$transport" --prompts prompts.txt --max-new-tokens 100 --timeout 20 2>&1 | tee lost.log
    grep -q "lost rank\|died" lost.log
}
check_hanging_rank_is_named() {
    many
    lose STOP 1 run a.json --model "$mixtral" --transport "$transport" --prompts prompts.txt --max-new-tokens 100 --timeout 20 2>&1 | tee hung.log
    grep -q "rank" hung.log
}
check_serving_survives() {
    many
    aurora plan --cluster cluster.toml --profile a.npz --min-replicas 2 -o spare.json || cp a.json spare.json
    lose KILL 1 run spare.json --model "$mixtral" --transport "$transport" --prompts prompts.txt --max-new-tokens 100 --survive --respawn 2 --verify -o answers.jsonl
}
check_training() {
    aurora train "$mixtral" --text "$root/LICENSE" --ranks "$ranks" --steps 20 --transport "$transport" -o fixed &&
        aurora train "$mixtral" --text "$root/LICENSE" --ranks 1 --steps 20 --transport "$transport" -o single && same_losses fixed single
}
check_elastic_training() {
    many
    aurora train "$mixtral" --text "$root/LICENSE" --ranks "$ranks" --steps 20 --elastic --transport "$transport" -o elastic && same_losses fixed elastic
}
check_elastic_training_survives() {
    many
    lose KILL 5 train "$mixtral" --text "$root/LICENSE" --ranks "$ranks" --steps 60 --elastic --respawn 2 --transport "$transport" -o lossy
}
check_vllm() {
    gpu
    many
    python -c 'import vllm' || { echo "vllm is not installed"; exit 77; }
    python -m tests.integrations.tiny qwen3moe vllm-model && python "$root/bench/gpu/served.py" vllm-model "$ranks"
}

# same_losses FOLDER FOLDER: the losses of two trainings are within 1e-3 of each other.
same_losses() {
    python - "$1/log.jsonl" "$2/log.jsonl" <<'PY'
import json, sys
one, other = ([line["loss"] for line in map(json.loads, open(name)) if "loss" in line] for name in sys.argv[1:])
worst = max(abs(a - b) for a, b in zip(one, other, strict=True))
print(f"losses differ by {worst:.2g} at most")
sys.exit(worst > 1e-3)
PY
}

checks=(inputs kernels stages links_under_torchrun answers deduplicated order_by_measurement order_held prediction phases_by_events
    two_models time_slices_by_layer two_processes experts_follow lost_rank_is_named hanging_rank_is_named serving_survives
    training elastic_training elastic_training_survives vllm)
echo "$([ -n "$dry" ] && echo "$ranks ranks on CPUs over gloo" || nvidia-smi --query-gpu=name,driver_version --format=csv,noheader); logs in $folder"
for check in "${@:-${checks[@]}}"; do
    declare -F "check_$check" >/dev/null || { echo "run.sh: no check $check; expected ${checks[*]}" >&2; exit 2; }
    began=$SECONDS
    (check_"$check") >"$check.log" 2>&1
    status=$?
    case $status in 0) word=PASS ;; 77) word=SKIP ;; *) word=FAIL failed=1 ;; esac
    printf '%s  %-28s %4d s  %s\n' "$word" "$check" $((SECONDS - began)) "$([ $word = PASS ] || tail -n 1 "$check.log")"
    results+=("{\"check\": \"$check\", \"result\": \"$word\", \"seconds\": $((SECONDS - began)), \"exit\": $status}")
    (IFS=,; echo "{\"schema\": 1, \"dry\": $([ -n "$dry" ] && echo true || echo false), \"ranks\": $ranks, \"checks\": [${results[*]}]}") >results.json
done
exit $failed
