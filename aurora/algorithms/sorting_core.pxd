from aurora.algorithms.core_arrays cimport Floats1, Index, Ints1

cdef void descending(Floats1 key, Ints1 order, Ints1 spare, Index n) noexcept nogil
