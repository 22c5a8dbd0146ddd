"""Ranks as processes.

- `launcher`: starts local ranks and collects what they return
- `connections`: sockets that belong to process groups, and those that do not; calls that wait for peers, and are left behind
"""
