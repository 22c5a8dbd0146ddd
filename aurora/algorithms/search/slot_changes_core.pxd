from aurora.algorithms.core_arrays cimport *
from aurora.algorithms.search.slots_core cimport Layer, Slots

ctypedef struct SwapFound:
    Float value_s
    Index p
    Index h
    Index q
    Int priced

ctypedef struct CountFound:
    Float value_s
    Index to
    Index place
    Index come
    Int priced

cdef SwapFound best_swap(Layer layer, Slots slots, Index g, Float best_s) noexcept nogil
cdef CountFound best_count_change(Layer layer, Slots slots, Index g, Float best_s) noexcept nogil
cdef Float count_changed(Layer layer, Slots slots, Index h, Index x, Index e, Float best_s) noexcept nogil
cdef SwapFound best_place(Layer layer, Slots slots, Index a, Float best_s, bint filling) noexcept nogil
