"""Plans two models that share four GPUs, and compares their simulated time with one after the other."""

import aurora

cluster = aurora.load("demo-4")
options = aurora.SyntheticOptions(sources=4, window_tokens=256)
models = [aurora.synthetic_profile("zipf:1", name, options) for name in ("mixtral-topics", "qwen3moe-stdlib")]

shared = aurora.plan(cluster, models)
print(shared.scenario)
for model in shared.models:
    print(f"{model.model}: experts of layer 0 by GPU {model.placement.slots_LG[0]}")

shared_s = aurora.simulate(shared, models).seconds
exclusive_s = [aurora.simulate(aurora.plan(cluster, model), model).seconds for model in models]
print(
    f"one after the other {sum(exclusive_s):.3f} s, sharing the GPUs {shared_s:.3f} s: {sum(exclusive_s) / shared_s:.2f} times as fast"
)
