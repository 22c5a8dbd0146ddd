"""The evaluation of Lazarus (arXiv:2407.04656) in its own set-up, ours beside."""
