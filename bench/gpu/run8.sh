#!/usr/bin/env bash
# All of ours that needs several GPUs, on the eight of a machine: `bash bench/gpu/run8.sh [--dry] [--list] [-o FOLDER] [STEP...]`.
#
# As run.sh, beside which it needs nothing; three GPUs or more will do.
minutes=45 least=3 dry_ranks=3
source "$(dirname "$(readlink -f "$0")")/steps.sh"

# rank_of PID: a rank's process of the run with this process id, drawn when all are there; fails if the run ends before.
rank_of() {
    local server pids
    while kill -0 "$1" 2>/dev/null; do
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
    local signal=$1 seconds=$2 pid rank status
    shift 2
    "${PYTHON:-python3}" -m aurora "$@" &
    pid=$!
    trap "kill $pid 2>/dev/null" EXIT
    rank=$(rank_of $pid) && sleep "$seconds" && kill "-$signal" "$rank"
    wait $pid
    status=$?
    [ "$signal" = STOP ] && [ -n "$rank" ] && kill -KILL "$rank" 2>/dev/null
    return $status
}
served_while() { lose "$1" 1 run "$2" --model "$trained" --transport "$transport" --prompts prompts.txt --max-new-tokens 100 "${@:3}"; }

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

step stages 180
step_stages() { bench stages --ranks "$ranks" --large; }

step inputs 120
step_inputs() {
    profiles_and_plans && python -m torch.distributed.run --standalone --nproc-per-node "$ranks" --no-python \
        "${PYTHON:-python3}" -m aurora measure links -o links.toml
}

step push 90
step_push() { bench rates --ranks "$ranks"; }

step deepep 120
step_deepep() {
    python -c 'import deep_ep' 2>/dev/null || skip "DeepEP is not installed"
    [ -f "${DEEPEP:-}/tests/test_intranode.py" ] || skip "expected DEEPEP, the folder of DeepEP's clone, whose own test is the baseline"
    (cd "$DEEPEP" && python tests/test_intranode.py --num-processes "$ranks")
}

step vllm 1500
step_vllm() {
    [ -n "$dry" ] || python -c 'import vllm' 2>/dev/null || skip "vllm is not installed"
    rm -rf served.json seen
    bench served vllm-model "$ranks" vLLM record || return
    if [ -n "$dry" ]; then  # the stand-in records nothing
        aurora synthetic zipf:1 vllm-model --sources "$ranks" -o seen.npz
    else
        aurora import seen --format vllm-record -o seen.npz
    fi && aurora plan --cluster cluster.toml --profile seen.npz --engine vllm -o served-plan.json &&
        bench served vllm-model "$ranks" plan push
}

step answers 90
step_answers() {
    aurora plan --cluster cluster.toml --profile a.npz --order matchings -o held.json && run held.json --model "$trained" --verify --trace held.npz &&
        run a.json --model "$trained" --verify --orders auto &&
        run a.json --model "$trained" --verify --compare || return
    aurora run a.json --transport push --model "$trained" --prompts prompts.txt --verify ${dry:+--max-new-tokens 2}
}

step together 150
step_together() {
    local both=(--model "$trained" --model "$other" --verify)
    run a.json --model "$trained" --trace apart.npz && run ab.json "${both[@]}" --interleave on && run ab.json "${both[@]}" --interleave off
}

step lost_rank 60
step_lost_rank() {
    served_while KILL a.json --timeout 20 >lost.log 2>&1
    grep "lost rank\|died" lost.log
}

step hanging_rank 60
step_hanging_rank() {
    served_while STOP a.json --timeout 20 >hung.log 2>&1
    grep "lost rank\|died\|cannot join" hung.log  # it may be stopped while it loads
}

step training 120
step_training() {
    local train=(train "$trained" --text "$root/LICENSE" --transport "$transport")
    aurora "${train[@]}" --ranks "$ranks" --steps 20 -o fixed && aurora "${train[@]}" --ranks 1 --steps 20 -o single &&
        aurora "${train[@]}" --ranks "$ranks" --steps 20 --elastic -o elastic || return
    lose KILL 5 "${train[@]}" --ranks "$ranks" --steps 60 --elastic --respawn 2 -o lossy && same_losses fixed single && same_losses fixed elastic
}

main "$@"
