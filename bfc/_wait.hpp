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

}  // namespace bfc
