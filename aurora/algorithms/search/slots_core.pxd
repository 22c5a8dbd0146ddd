cimport cython
from aurora.algorithms.core_arrays cimport *

@cython.final
cdef class Layer:
    cdef ConstFloats4 part_s_GEXW
    cdef ConstFloats3 base_s_GXW
    cdef ConstFloats1 fixed_s_Z
    cdef ConstFloats3 count_ZYW
    cdef ConstInts1 slots_G
    cdef Index worst
    cdef Index alike
    cdef Index gpus
    cdef Index experts
    cdef Index cases
    cdef Index sums

@cython.final
cdef class Slots:
    cdef Ints2 held_GP
    cdef Floats1 share_E
    cdef Ints1 count_E
    cdef Ints2 gpu_EG
    cdef Flags2 holds_GE
    cdef Floats3 sum_s_GXW
    cdef Ints3 top_YWR
    cdef Floats3 top_s_YWR
    cdef Floats1 path_s_Z
    cdef Floats1 ranked_Z
    cdef Floats2 weight_YW
    cdef Float fixed_s
    cdef Floats3 row_GXW
    cdef Ints1 gpu_G
    cdef Ints1 row_G
    cdef Floats3 ours_PXW
    cdef Floats3 theirs_QXW
    cdef Floats2 rest_YW
    cdef Floats2 most_YW
    cdef Floats1 gain_G
    cdef Flags1 tried_G

cdef void add_share(Layer layer, Floats3 row_GXW, Index at, Index g, Index e, Float share) noexcept nogil
cdef void copy_with_share(Layer layer, ConstFloats3 sum_s_GXW, Floats3 row_GXW, Index at, Index g, Index e, Float share) noexcept nogil
cdef void load_slots(Layer layer, Slots slots, Ints2 held_GP) noexcept nogil
cdef void swap(Layer layer, Slots slots, Index g, Index p, Index h, Index q) noexcept nogil
cdef void overwrite(Layer layer, Slots slots, Index h, Index q, Index e) noexcept nogil
cdef Index slot_of(Layer layer, Slots slots, Index g, Index e) noexcept nogil
cdef Float price(Layer layer, Slots slots) noexcept nogil
cdef void find_gains(Slots slots) noexcept nogil
cdef void find_rest(Slots slots) noexcept nogil
cdef Float objective(Layer layer, Slots slots, Float best_s) noexcept nogil
