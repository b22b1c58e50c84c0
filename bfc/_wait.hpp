// Waiting for a lock, by who may hold the GIL or not.
#pragma once

#include <Python.h>

#include "_lock.hpp"

namespace bfc {

// Holding the GIL while waiting would keep the lock's holder from finishing, if that is a Python thread.
inline void acquire(Lock& lock) noexcept {
    if (lock.try_acquire()) return;
    if (!PyGILState_Check()) {
        lock.wait_and_acquire();
        return;
    }
    PyThreadState* state = PyEval_SaveThread();
    lock.wait_and_acquire();
    PyEval_RestoreThread(state);
}

// Lets others have a lock that the caller holds, if there are any, and takes it again. Who gets it may want the GIL before
// letting go of it.
inline void give_way(Lock& lock) noexcept {
    if (!lock.is_wanted()) return;
    if (!PyGILState_Check()) {
        lock.give_way();
        return;
    }
    PyThreadState* state = PyEval_SaveThread();
    lock.give_way();
    PyEval_RestoreThread(state);
}

}  // namespace bfc
