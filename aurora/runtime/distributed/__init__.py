"""Ranks as processes: starting and watching them, and work whose processes come and go.

- `launcher`: starts local ranks and collects what they return
- `supervisor`: watches ranks that may be lost, and forms epochs of the ranks that are left; `membership`: which ranks are in an
  epoch; `rank_processes`: their processes; `control_channel`: the messages between them; `epoch_groups`: an epoch's process
  groups
- `lighthouse`: where members of an elastic run meet, on one machine or several; `quorum`: what it decides; `member`: a
  member's end; `connections`, `signed_messages`, `secret`: how they talk, and prove who they are; `elastic_steps`,
  `commit_rule`: steps that all members commit or none
- `secret`: the secret that members prove to know
"""
