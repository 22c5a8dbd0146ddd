"""Where experts sit, of one model or of two that share the GPUs, with what it costs and what no placement beats."""
