"""Performs Programs over transports: ordered dispatch and combine, models interleaved."""
