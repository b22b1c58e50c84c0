"""Turns at an object, where no GIL keeps others away from it: see turns.hpp."""

cdef extern from "turns.hpp" namespace "bfc":
    cdef cppclass TurnAt:
        void take(object whose)         # until the function ends
    int take_turns(object type, const char* but) except -1
    void keep_for_ever(object found)
    int watch_forks(object whose) except -1
    void unwatch_forks(object whose)
    T count_by[T](T& number, T more) nogil
    T counted[T](const T& number) nogil
    void put[T](T& number, T value) nogil
