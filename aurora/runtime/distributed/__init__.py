"""Ranks as processes.

- `launcher`: starts local ranks and collects their results
- `connections`: sockets that listen, sockets of process groups
- `fork_server`: ends the process that ranks are forked from
"""
