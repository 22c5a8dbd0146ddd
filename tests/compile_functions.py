"""Compiles what most tests call, once, before several workers would each do it: `python -m tests.compile_functions`."""

import doctest
import sys

import aurora

NAMES = ("plan", "evaluate", "place_for_failures", "recommend", "order", "simulate")

if __name__ == "__main__":
    examples = [doctest.DocTestFinder(recurse=False).find(getattr(aurora, name), name, globs={})[0] for name in NAMES]
    sys.exit(sum(doctest.DocTestRunner().run(each).failed for each in examples))
