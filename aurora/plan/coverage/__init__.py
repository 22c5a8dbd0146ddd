"""Sums collected from redundant workers: does the union of what some of them hold cover everything?

Axes here: W workers, B batches, J groups of batches, K messages waited for (0..W), I iterations. A load is how many batches
a worker holds. Source throughout: Li, Kalan, Avestimehr, Soltanolkotabi, arXiv:1710.09990 ("BCC").
"""
