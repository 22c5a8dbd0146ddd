"""What is known of traffic and compute before planning: load statistics, drift, synthetic traffic, model configs, curves."""
