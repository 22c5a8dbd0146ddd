"""Elastic training, whose ranks come and go, on torchft: membership, process groups of each epoch, and committed steps.

- `lighthouse`: torchft's lighthouse, in a process of its own
- `member`: takes part in rounds at the lighthouse, and in the epochs that they begin
- `epoch_groups`: gloo group of an epoch, and its transport; `epoch_nccl`: NCCL communicator
- `abandoned_calls`: calls that wait for peers, and are left behind when an epoch is over
- `processes`: ranks of this host
- `steps`: steps that all members commit, or none
"""
