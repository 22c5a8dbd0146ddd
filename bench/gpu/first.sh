#!/usr/bin/env bash
# The first ten minutes on one H100 or H200 as they are rented: `bash bench/gpu/first.sh [--dry] [--list] [-o FOLDER] [STEP...]`.
#
# Needs torch 2.11 for CUDA 13 with its Triton, numpy, scipy, networkx, Cython, setuptools and gcc; transformers for `layer` and the steps
# after it; no vLLM and no package index. Wheels in wheels/ (`pip download --no-deps -d wheels msgspec cyclopts docstring-parser tomli-w`
# on another machine) are unpacked into FOLDER. Leaves FOLDER/results.json after each step, and all logs in FOLDER/logs.tar.gz.
# Ends with 0 only if push reaches 0.7 of a copy within the GPU and all answers are equal.
minutes=10 least=1 dry_ranks=1
source "$(dirname "$(readlink -f "$0")")/steps.sh"
required="rates push answers"

step build 80
step_build() { (cd "$root" && python hatch_build.py); }

step rates 60
step_rates() { bench rates; }

step push 110
step_push() { bench pushes; }

step kernels 40
step_kernels() { bench kernels; }

step layer 60
step_layer() { bench layer; }

step experts 50
step_experts() { bench experts; }

step two_models 50
step_two_models() { bench colocated; }

step inputs 50
step_inputs() { profiles_and_plans; }

step answers 50
step_answers() { run a.json --model "$trained" --verify && run ab.json --model "$trained" --model "$other" --verify; }

step facts 40
step_facts() { TRITON_INTERPRET=0 python -m tests.compile_kernels 90; }

main "$@"
