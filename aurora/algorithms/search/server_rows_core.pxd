cimport cython
from aurora.algorithms.core_arrays cimport *
from aurora.algorithms.search.slots_core cimport Layer, Slots

@cython.final
cdef class ServerRows:
    cdef ConstInts1 server_G
    cdef Float most_gpu_s
    cdef Float most_server_s
    cdef ConstFloats2 server_s_NE
    cdef Floats1 server_s_N
    cdef Ints2 chosen_EW
    cdef Ints3 hits_NBW
    cdef Ints2 none_NW
    cdef Ints2 sole_NW
    cdef Ints1 carry_W
    cdef Int rows
    cdef Float over_s

cdef Int peek_rows(ServerRows rows, Index a, Index p, Index b, Index q) noexcept nogil
cdef Float peek_over(ServerRows rows, Layer layer, Slots slots, Index a, Index g, Index b, Index h) noexcept nogil
cdef void add(ServerRows rows, Index n, Index a) noexcept nogil
cdef void remove(ServerRows rows, Index n, Index a) noexcept nogil
