"""Elastic runs, whose ranks come and go, on torchft: membership, process groups of each epoch, and committed steps.

For all such runs:

- `lighthouse`: torchft's lighthouse, in a process of its own
- `member`: takes part in rounds at the lighthouse, and in the epochs that they begin
- `epoch_groups`: gloo groups of an epoch, and their transport; `epoch_nccl`: NCCL communicators
- `processes`: ranks of this host
- `hosts`: ranks of several hosts, as the leader sees them, and a host that joins; `host_connection`: their connection

For training: `steps`: steps that all members commit, or none.

For serving: `serving`: runs, and the journal of requests; `coordinated_ranks`: the process that assigns work to ranks;
`control_channel`: its connection to them; `elastic_rank`: a rank.
"""
