"""Work whose processes come and go, on torchft: who takes part, which process groups they have, and which steps count.

Of all such runs:

- `lighthouse`: torchft's lighthouse, in a process of its own
- `board`: what members tell each other in a round at the lighthouse, and what follows from it
- `member`: takes part in rounds, and in the epochs that they begin
- `epoch_groups`: gloo groups of an epoch, and their transport; `epoch_nccl`, `epoch_gpu`: NCCL communicators
- `processes`: ranks of this host
- `hosts`: a leader's view of hosts that join; `joining_host`: theirs; `host_connection`, `messages`: how they talk;
  `host_agreement`: what they must have in common

Of training: `steps`, in which all members commit or none; `commit_rule`: which count.

Of serving: `serving`: runs; `coordinated_ranks`: the process that assigns work, and `control_channel` to its ranks;
`request_journal`: the work; `elastic_rank`: a rank.
"""
