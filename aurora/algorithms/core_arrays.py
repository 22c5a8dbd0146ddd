"""Types of compiled modules, as core_arrays.pxd declares them: C-contiguous arrays by their number of axes.

`Const...` also takes arrays that may only be read. Uncompiled code, which alone imports this file, ignores those of arrays.
"""

import cython

Index, Int, Float = cython.Py_ssize_t, cython.longlong, cython.double
Flags1 = Flags2 = Ints1 = Ints2 = Ints3 = Ints4 = Floats1 = Floats2 = Floats3 = Floats4 = object
ConstFlags1 = ConstFlags2 = ConstInts1 = ConstInts2 = ConstInts3 = object
ConstFloats1 = ConstFloats2 = ConstFloats3 = ConstFloats4 = object
EMPTY = -1  # in place of an expert, a slot or a GPU


def larger(a: float, b: float) -> float:
    """Returns the larger of two numbers."""
    return a if a > b else b
