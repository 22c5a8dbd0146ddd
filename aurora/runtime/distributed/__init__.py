"""Ranks as processes.

- `launcher`: starts local ranks and collects what they return
- `connections`: sockets that belong to process groups, and those that do not
- `heartbeats`: which ranks of a process group hang
- `abandoned_calls`: calls that wait for peers, and are left behind
"""
