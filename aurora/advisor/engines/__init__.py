"""Serving engines as they are: what each does by default and with each flag that matters for MoE models, a file each."""
