"""Plans two models that share eight L40S over 100 GbE, and compares their simulated time with one after the other."""

import aurora

cluster = aurora.load("l40s-100gbe-8")
config = {
    "model_type": "mixtral",
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
options = aurora.SyntheticOptions(sources=8, window_tokens=256)  # drawn traffic; compute times by arithmetic from the datasheet
models = [aurora.synthetic_profile("zipf:0.8", config, options, gpu_kinds=["NVIDIA L40S"]) for _ in range(2)]

shared = aurora.plan(cluster, models)
print(shared.scenario)
for model in shared.models:
    print(f"experts of layer 0 by GPU: {model.placement.slots_LG[0]}")

shared_s = aurora.simulate(shared, models).seconds
exclusive_s = sum(aurora.simulate(aurora.plan(cluster, model), model).seconds for model in models)
print(f"one after the other {exclusive_s * 1e3:.1f} ms, sharing the GPUs {shared_s * 1e3:.1f} ms")
print(f"{exclusive_s / shared_s:.2f} times as fast")
