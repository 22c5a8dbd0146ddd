"""The evaluation of BCC (arXiv:1710.09990) in its own set-up, ours beside."""
