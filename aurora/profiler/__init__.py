"""Measurements: a model's routing, the seconds of its phases, and the machines' links and devices.

Each measurement is a function that returns a value:

- `profile_model.profile_model`: routing of a model on text, and its compute curves (a Profile)
- `synthetic.synthetic_profile`: routing drawn by a named skew, computed (not measured) compute times (a Profile)
- `import_routing.import_profile`, `profile_vllm_server`: routing that an engine recorded (a Profile)
- `merge_records.load_records`: what the vLLM plugin recorded on each rank (a Profile)
- `compute_timing.measure_curves`: compute curves alone (ComputeCurves)
- `link_timing.measure_links`: links between ranks (MeasuredCluster)
- `devices.find_devices`: this machine's GPUs (DeviceCluster)
- `doctor.examine`: whether each part of aurora works on this machine (Findings)
"""
