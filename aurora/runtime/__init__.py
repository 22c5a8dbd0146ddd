"""Performs Programs over transports: ordered dispatch and combine, two models interleaved."""
