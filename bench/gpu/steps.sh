# Shared by first.sh, run.sh and run8.sh, which source it: steps with a time limit, a line for each, results.json, logs.tar.gz.
#
# Python is ${PYTHON:-python3}, with `aurora-moe[run,gpu]` and, on a GPU, torch's Triton: a driver from 580 on for CUDA 13, gcc, Python.h.
# A script sets `about` and `minutes`, names its steps by `step NAME SECONDS`, defines step_NAME for each, and ends with `main "$@"`.
# A step exits 0 (PASS), 77 (SKIP) or else (FAIL); the last line of its log is shown. It runs in a process group that is ended when its
# time is over. What Python steps report is in the file $FIGURES.
set -uo pipefail
script=$(readlink -f "$0")
root=$(cd "$(dirname "$script")/../.." && pwd)
dry= folder= inside= slower=1 steps=() results=() failed=0 required= passed=' '
declare -A limit
trained=$root/profiles/models/mixtral-topics other=$root/profiles/models/qwen3moe-stdlib

step() { steps+=("$1") limit[$1]=$2; }
python() { command "${PYTHON:-python3}" "$@"; }
aurora() { python -m aurora "$@"; }
bench() { python -m "bench.gpu.$1" "${@:2}"; }
run() { aurora run "$1" --transport "$transport" --prompts prompts.txt --max-new-tokens "${tokens:-16}" "${@:2}"; }
skip() { echo "$1"; exit 77; }
make_prompts() { printf 'import os\nThe statement\nA list is\nclass Shape:\n%.0s' 1 2 3 4 >prompts.txt; }


# profiles_and_plans: of two shipped models on the ranks of this machine.
profiles_and_plans() {
    make_prompts
    if [ "$ranks" -gt 1 ]; then
        aurora measure links --ranks "$ranks" -o cluster.toml || return
    elif [ -n "$dry" ]; then  # NVML would name the GPU
        printf 'schema = 1\nname = "dry"\n[[gpu]]\nname = "gpu"\nkind = "cpu"\nnode = 0\nout_Bps = 1e9\nin_Bps = 1e9\nmemory_bytes = 1_000_000_000_000\n' >cluster.toml
    else
        aurora measure devices -o cluster.toml || return
    fi
    aurora profile "$trained" --text "$root/LICENSE" --sources "$ranks" --limit 32 -o a.npz &&
        aurora profile "$other" --text "$root/tests/conftest.py" --sources "$ranks" --limit 32 -o b.npz &&
        aurora plan --cluster cluster.toml --profile a.npz -o a.json &&
        aurora plan --cluster cluster.toml --profile a.npz --profile b.npz -o ab.json
}

# under_mps COMMAND...: runs the command under a server of CUDA MPS of its own. With --dry only the server is left out.
under_mps() (
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) # whose name is short, as names of sockets must be
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    mps_control -d || exit
    trap 'echo quit | mps_control' EXIT
    trap 'exit 143' TERM
    "$@"
)
mps_control() { if [ -n "$dry" ]; then cat </dev/null; else nvidia-cuda-mps-control "$@"; fi; }
has_mps() { [ -n "$dry" ] || command -v nvidia-cuda-mps-control >/dev/null && under_mps true; }

usage() {
    echo "$(basename "$script"): expected --dry, --list, -o FOLDER or names of steps (${steps[*]}), found $1" >&2
    exit 2
}

main() {
    local name each asked status began left most words said figures
    while [ $# -gt 0 ]; do
        case $1 in
            --dry) dry=--dry ;;
            --list) for each in "${steps[@]}"; do echo "$each ${limit[$each]}"; done; exit ;;
            --inside) inside=yes ;;
            -o) [ $# -gt 1 ] || usage "-o without one"; folder=$2; shift ;;
            -*) usage "$1" ;;
            *) break ;;
        esac
        shift
    done
    for name in "$@"; do [ -n "${limit[$name]:-}" ] || usage "$name"; done
    export PYTHONPATH=$root:$root/integrations${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
    [ -z "$dry" ] || export TRITON_INTERPRET=1
    if [ -n "$inside" ]; then
        ranks=$RANKS_HERE
        transport=$([ -n "$dry" ] && echo gloo || echo nccl)
        cd "$folder" && "step_$1"
        exit
    fi
    mkdir -p "${folder:=gpu-$(date -u +%F)}" && folder=$(cd "$folder" && pwd) || exit 2
    if compgen -G "$root/wheels/*.whl" >/dev/null; then
        python -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$folder/site" "$root"/wheels/*.whl || exit 2
        export PYTHONPATH=$PYTHONPATH:$folder/site
    fi
    { read -r gpus && read -r words; } < <(python -m bench.gpu.device) || exit 2
    export RANKS_HERE=${dry:+$dry_ranks}
    RANKS_HERE=${RANKS_HERE:-$gpus}
    [ "$RANKS_HERE" -ge "$least" ] || { echo "$(basename "$script"): expected $least GPUs, found $gpus; --dry needs none" >&2; exit 2; }
    echo "$RANKS_HERE ranks; logs in $folder; $words"
    [ -z "$dry" ] || slower=20  # than a GPU
    minutes=$((slower * minutes))
    for name in "${@:-${steps[@]}}"; do
        began=$SECONDS left=$((60 * minutes - SECONDS))
        export FIGURES=$folder/$name.json
        rm -f "$FIGURES"
        if [ "$left" -lt 10 ]; then
            echo "no time is left of $minutes minutes" >"$folder/$name.log"
            status=77
        else
            most=$((slower * ${limit[$name]}))
            [ "$most" -gt "$left" ] || left=$most
            timeout -k 15 "$left" bash "$script" $dry -o "$folder" --inside "$name" >"$folder/$name.log" 2>&1
            status=$?
        fi
        case $status in
            0) asked=PASS passed+="$name " ;;
            77) asked=SKIP ;;
            124 | 137) asked=FAIL failed=1; echo "ended after $left s" >>"$folder/$name.log" ;;
            *) asked=FAIL failed=1 ;;
        esac
        said=$(tail -n 1 "$folder/$name.log" | tr -d '\000-\037' | cut -c 1-300)
        printf '%s  %-16s %4d s  %s\n' "$asked" "$name" $((SECONDS - began)) "$said"
        said=${said//\\/\\\\}
        figures=$(cat "$FIGURES" 2>/dev/null || echo null)
        results+=("{\"step\": \"$name\", \"result\": \"$asked\", \"seconds\": $((SECONDS - began)), \"exit\": $status, \"said\": \"${said//\"/\\\"}\", \"figures\": $figures}")
        (IFS=,; echo "{\"schema\": 2, \"dry\": $([ -n "$dry" ] && echo true || echo false), \"ranks\": $RANKS_HERE, \"machine\": $words, \"steps\": [${results[*]}]}") >"$folder/results.json"
        (cd "$folder" && tar -czf logs.tar.gz results.json ./*.log)
    done
    for each in $([ $# -gt 0 ] || echo $required); do  # where all steps are asked for
        [[ $passed == *" $each "* ]] || failed=1
    done
    exit $failed
}
