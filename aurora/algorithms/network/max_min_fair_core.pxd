"""Structs and arrays of max_min_fair_core. What is by side has the sender's at 0 and the receiver's at 1."""

cimport cython
from aurora.algorithms.core_arrays cimport *

cdef struct Row:  # a transfer of an all-to-all
    Int rank[2]  # by side
    Int use[4]  # the row's resource of each kind; -1 if none
    Int next[4]  # the next row on that resource; -1 if none
    Int prev[4]  # the row before on that resource; -1 if none
    Int slot  # the number of the row's all-to-all
    Int bytes
    Int stage  # 0 unless the all-to-all runs in stages
    Int tier
    Int admitted  # how many of the row's two ends have admitted it
    Int stamp  # the last connected component in which the row was found; negative once its rate is fixed there
    Float limit_Bps  # the rate that the row never exceeds; infinite if it has no limit
    Float startup_s  # seconds of start-up before bytes flow
    Float left_bytes  # bytes still to carry, as of since_s
    Float since_s  # since when the row has its present rate
    Float rate_Bps  # the present rate; negative during start-up
    Float start_s  # when the row started, before its start-up
    Float end_s

cdef struct Queue:  # the rows that a port has yet to admit in one tier of an all-to-all, as a part of SwitchState.turns
    Int at  # the first row that the port has not admitted
    Int stop  # after its last row
    Int free  # how many more transfers the port may have under way

cdef struct Member:  # a rank in an all-to-all
    Int unfinished[2]  # how many of its rows have not ended, by side
    Int stage  # the stage that it is in
    Int under_way  # how many rows it has admitted, as sender or receiver, that have not ended

cdef struct Resource:
    Int kind
    Int head  # the first row on it; -1 if none
    Int flows  # how many rows are on it
    Int stamp  # the last connected component in which it was found; -1 if its flows changed since
    Int unfixed  # scratch, how many of its flows have no fixed rate yet
    Int found  # scratch, at index i the i-th resource of a component
    Int dirty  # at index i the i-th resource whose flows changed since rates were last computed
    Float capacity_Bps  # bytes per second that it carries
    Float spare_Bps  # scratch, bytes per second that flows with fixed rates leave

cdef struct Part:  # a part of a row that flowed at one rate
    Int row
    Float start_s
    Float end_s
    Float rate_Bps
    Float carried_bytes  # bytes of the row carried up to end_s, earlier parts included

@cython.final
cdef class SwitchState:
    cdef Row[::1] rows
    cdef Ints2 turns, done
    cdef Queue[:, :, :, ::1] queues
    cdef Member[:, ::1] members
    cdef Floats1 event_s
    cdef Part[::1] log
    cdef Resource[::1] resources
    cdef Index kinds, dirty  # dirty: how many resources are
    cdef Float incast
    cdef bint logging
    cdef Int last_stamp
    cdef readonly Float now_s  # the present time
    cdef readonly Index under_way  # rows that have started and not ended
    cdef readonly Index ended  # length of `done`
    cdef readonly Index logged  # length of the log
