#!/usr/bin/env bash
# All of ours that needs a GPU, on one: `bash bench/gpu/run.sh [--dry] [--list] [-o FOLDER] [STEP...]`, in an environment with `aurora-moe[run,gpu]`.
#
# Everything is made here: models, profiles, clusters, plans. FOLDER (gpu-DATE) has a log of each step and results.json. --dry runs the
# same steps on CPUs, with gloo for NCCL, Triton's interpreter for kernels, and a stand-in for vLLM.
minutes=25 least=1 dry_ranks=1
source "$(dirname "$(readlink -f "$0")")/steps.sh"

# Real NCCL of several ranks on one GPU: few blocks, so that all ranks' kernels fit beside each other.
shared_gpu() {
    export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2 TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1
    if has_mps; then under_mps "$@"; else "$@"; fi
}

step kernels 90
step_kernels() { bench kernels; }

step push 150
step_push() { bench pushes; }

step layer 90
step_layer() { bench layer; }

# `nccl` and `answers_nccl` need NCCL 2.30; torch 2.11 brings 2.28, with which they are left out.
step nccl 150
step_nccl() { shared_gpu bench stages --shared --ranks "$([ -n "$dry" ] && echo 2 || echo 4)"; }

step experts 90
step_experts() { bench experts; }

step two_models 150
step_two_models() {
    if has_mps; then under_mps bench colocated --processes mps.json || return; fi
    bench colocated
}

step vllm 330
step_vllm() {
    [ -n "$dry" ] || python -c 'import vllm' 2>/dev/null || skip "vllm is not installed"
    rm -f served.json
    bench served vllm-model 1 vLLM record
}

step inputs 90
step_inputs() { profiles_and_plans; }

step answers 60
step_answers() {
    run a.json --model "$trained" --verify --compare --trace phases.npz &&
        aurora report a.json phases.npz --format perfetto -o phases.json
}

step answers_nccl 120
step_answers_nccl() {
    bench stages --has-shared || exit
    ranks=2
    mkdir -p two && cd two && shared_gpu planned_and_answered
}
planned_and_answered() { profiles_and_plans && run a.json --model "$trained" --verify; }

step two_served 120
step_two_served() {
    local both=(--model "$trained" --model "$other" --verify) b
    run ab.json "${both[@]}" --interleave on && run ab.json "${both[@]}" --interleave off || return
    aurora plan --cluster cluster.toml --profile a.npz --profile b.npz --time-slice layer -o layer.json && run layer.json "${both[@]}" || return
    aurora plan --cluster cluster.toml --profile b.npz -o b.json || return
    run a.json --model "$trained" --verify --interleave processes --gpu-group "gpu-$$" --trace one.npz &
    run b.json --model "$other" --verify --interleave processes --gpu-group "gpu-$$" --trace other.npz && wait $!
}

step training 60
step_training() { aurora train "$trained" --text "$root/LICENSE" --ranks 1 --steps 20 --transport "$transport" -o trained; }

main "$@"
