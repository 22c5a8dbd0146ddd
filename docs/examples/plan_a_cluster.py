"""Plans a model for eight mixed GPUs, and compares the plan with experts in index order and all transfers at once."""

import aurora

cluster = aurora.load("paper-mixed-8")  # a shipped cluster, or a TOML file of yours
traffic = aurora.synthetic_profile("zipf:0.8", "mixtral-topics", aurora.SyntheticOptions(sources=8))

plan = aurora.plan(cluster, traffic)
print(plan.scenario)
print(f"objective {plan.objective_s * 1e6:.1f} us a step; no placement is below {plan.bound_s * 1e6:.1f} us")

first = plan.models[0]
for gpu, experts in zip(cluster.gpus, first.placement.slots_LG[0], strict=True):
    print(f"layer 0, {gpu.name}: experts {experts}")
for sender, receiver in first.dispatch_L[0].pairs_X2[:3].tolist():
    print(f"layer 0, dispatch: {sender} sends to {receiver}")

plain = aurora.plan(cluster, traffic, aurora.PlanOptions(place="contiguous", assign="contiguous", order="all-at-once"))
planned_s, plain_s = (aurora.simulate(each, traffic).seconds for each in (plan, plain))
print(f"simulated: {plain_s / planned_s:.2f} times as fast as experts in index order, all transfers at once")
