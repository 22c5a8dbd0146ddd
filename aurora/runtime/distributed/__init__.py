"""Ranks as processes.

- `launcher`: starts local ranks and collects their results
- `connections`: connections that are marked urgent
- `fork_server`: ends the process that ranks are forked from
"""
