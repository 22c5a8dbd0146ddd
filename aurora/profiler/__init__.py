"""Measurements: a model's routing, the seconds of its phases, and the machines' links and devices.

Each is a function that returns a value:

- `profile_model.profile_model`: routing of a model on text, and its compute curves (a Profile)
- `synthetic.synthetic_profile`: routing drawn from a named skew, compute times by arithmetic (a Profile)
- `import_routing.import_profile`, `profile_vllm_server`: routing that an engine recorded (a Profile)
- `compute_timing.measure_curves`: compute curves alone (ComputeCurves)
- `link_timing.measure_links`: links between ranks (MeasuredCluster)
- `devices.find_devices`: this machine's GPUs (DeviceCluster)
- `doctor.examine`: the parts of aurora that work on this machine (Findings)
"""
