// Waiting for a lock or for the GIL, for callers with or without the GIL.
#pragma once

#include <Python.h>
#include <unistd.h>

#include "lock.hpp"

namespace bfc {

// While the interpreter shuts down, Python up to 3.13 ends every other thread that asks for the GIL by unwinding its
// stack. A `noexcept` function on that stack, here or in a library that called us, then aborts the process. Later
// versions stop the thread for good, and so does this function.
[[noreturn]] inline void stop_here() noexcept {
    for (;;) pause();
}

inline void restore_gil(PyThreadState* state) noexcept {
    try {
        PyEval_RestoreThread(state);
    } catch (...) {
        stop_here();
    }
}

inline bool is_finalizing() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
}

// PyGILState_Check() alone returns true in every thread once the interpreter is gone.
inline bool holds_gil() noexcept { return Py_IsInitialized() && !is_finalizing() && PyGILState_Check(); }

// Takes the GIL, for callers that may hold it already.
inline PyGILState_STATE ensure_gil() noexcept {
    try {
        return PyGILState_Ensure();
    } catch (...) {
        stop_here();
    }
}

inline void acquire_with_gil(Lock& lock) noexcept {
    lock.start_waiting();
    bool acquired = false;
    for (int tries = 0; tries < 4 && !acquired; ++tries) {
        PyThreadState* state = PyEval_SaveThread();
#ifdef Py_GIL_DISABLED
        lock.let_turns_be_long();   // elsewhere the GIL's are
#endif
        lock.wait_until_free();
        restore_gil(state);
        acquired = lock.try_acquire();
    }
    lock.stop_waiting();
    if (!acquired) lock.wait_and_acquire();     // no deadlock: the lock's holder never waits for the GIL
}

__attribute__((noinline, cold)) inline void wait_and_acquire(Lock& lock) noexcept {
    if (holds_gil())
        acquire_with_gil(lock);
    else
        lock.wait_and_acquire();
}

// While this thread waits, other Python threads run. No thread waits for the GIL while it holds the lock: see lock.hpp.
inline void acquire(Lock& lock) noexcept {
    if (__builtin_expect(!lock.try_acquire(), 0)) wait_and_acquire(lock);
}

// Releases a lock that the caller holds if others wait for it, and takes it again.
inline void give_way(Lock& lock) noexcept {
    if (!lock.is_wanted()) return;
    if (!holds_gil()) {
        lock.give_way();
        return;
    }
    lock.release();
    PyThreadState* state = PyEval_SaveThread();
    lock.wait_for_others();
    restore_gil(state);
    acquire(lock);
}

}  // namespace bfc
