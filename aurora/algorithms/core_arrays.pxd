ctypedef Py_ssize_t Index
ctypedef long long Int
ctypedef double Float
ctypedef unsigned char[::1] Flags1
ctypedef unsigned char[:, ::1] Flags2
ctypedef long long[::1] Ints1
ctypedef long long[:, ::1] Ints2
ctypedef long long[:, :, ::1] Ints3
ctypedef long long[:, :, :, ::1] Ints4
ctypedef double[::1] Floats1
ctypedef double[:, ::1] Floats2
ctypedef double[:, :, ::1] Floats3
ctypedef double[:, :, :, ::1] Floats4
ctypedef const unsigned char[::1] ConstFlags1
ctypedef const unsigned char[:, ::1] ConstFlags2
ctypedef const long long[::1] ConstInts1
ctypedef const long long[:, ::1] ConstInts2
ctypedef const long long[:, :, ::1] ConstInts3
ctypedef const double[::1] ConstFloats1
ctypedef const double[:, ::1] ConstFloats2
ctypedef const double[:, :, ::1] ConstFloats3
ctypedef const double[:, :, :, ::1] ConstFloats4

cdef enum:
    EMPTY = -1

cdef inline double larger(double a, double b) noexcept nogil:
    return a if a > b else b
