"""The evaluation of Aurora (arXiv:2410.17043) in its own set-up, ours beside."""
