// Turns at an object: what the GIL is to the whole interpreter, in a Python without one.
//
// A thread with a turn has the object for itself, until it would let go of the GIL in another Python: while it waits or
// is in a driver, others have theirs. These are CPython's critical sections. So code that relies on the GIL between two
// such calls may rely on a turn at the object that it changes. Where there is a GIL, nothing here does anything.
#pragma once

#include <Python.h>

#include <pthread.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "gil_wait.hpp"

namespace bfc {

#ifdef Py_GIL_DISABLED

// From `take` to the end of the block. Not in a function that takes the GIL itself: it is let go of before.
class TurnAt {
public:
    TurnAt() = default;
    TurnAt(const TurnAt&) = delete;
    TurnAt& operator=(const TurnAt&) = delete;
    explicit TurnAt(PyObject* object) noexcept { take(object); }
    // Python ends a daemon thread, at its exit, where that waits for something else: it has no turn then.
    ~TurnAt() {
        if (!taken_) return;
        const PyThreadState* thread = PyThreadState_GetUnchecked();
        if (thread != nullptr && !(thread->critical_section & 1)) PyCriticalSection_End(&section_);
    }
    void take(PyObject* object) noexcept {
        if (has(object)) return;
        try {
            PyCriticalSection_Begin(&section_, object);
        } catch (...) {
            stop_here();    // Python is at its exit, and would unwind this thread's stack: see gil_wait.hpp
        }
        taken_ = true;
    }

private:
    // Whether the innermost turn of this thread is one at the object. Python 3.13 would let go of it, and wait for it.
    static bool has(PyObject* object) noexcept {
#if PY_VERSION_HEX < 0x030E0000
        const uintptr_t innermost = PyThreadState_GetUnchecked()->critical_section;
        if (innermost == 0 || innermost & 3) return false;  // none, one at two objects, or one that others have now
        return reinterpret_cast<const PyCriticalSection*>(innermost)->_cs_mutex == &object->ob_mutex;
#else
        return object == nullptr;   // never: later versions look themselves
#endif
    }

    PyCriticalSection section_;
    bool taken_ = false;
};

// Whether this thread has a turn at the object, in whichever function.
inline bool has_turn(PyObject* object) noexcept {
    const PyThreadState* thread = PyThreadState_GetUnchecked();
    uintptr_t at = thread == nullptr ? 0 : thread->critical_section;
    while (at != 0 && !(at & 1)) {      // what lies below an inactive one is inactive, too
        const auto* section = reinterpret_cast<const PyCriticalSection*>(at & ~uintptr_t{3});
        if (section->_cs_mutex == &object->ob_mutex) return true;
        if (at & 2 && reinterpret_cast<const PyCriticalSection2*>(section)->_cs_mutex2 == &object->ob_mutex) return true;
        at = section->_cs_prev;
    }
    return false;
}

// Objects at which nobody has a turn in a forked child, but for the thread that forked. Python stops the others where
// they have none, except for one that was just given it, since it had waited for long.
class TurnsInChild {
public:
    static TurnsInChild& all() {
        static TurnsInChild* turns = new TurnsInChild;      // never destroyed: threads may outlive statics
        return *turns;
    }
    void add(PyObject* object) {
        std::lock_guard<std::mutex> guard(mutex_);
        objects_.insert(object);
    }
    void remove(PyObject* object) noexcept {
        std::lock_guard<std::mutex> guard(mutex_);
        objects_.erase(object);
    }

private:
    TurnsInChild() { pthread_atfork(wait, go_on, reset); }
    static void wait() { all().mutex_.lock(); }
    static void go_on() { all().mutex_.unlock(); }
    static void reset() {
        for (PyObject* object : all().objects_)
            __atomic_store_n(&object->ob_mutex._bits, static_cast<uint8_t>(has_turn(object)), __ATOMIC_SEQ_CST);
        go_on();
    }

    std::mutex mutex_;
    std::set<PyObject*> objects_;
};

// From when an object is made to when it goes. Returns -1 with Python's error set.
inline int watch_forks(PyObject* object) noexcept {
    try {
        TurnsInChild::all().add(object);
        return 0;
    } catch (...) {
        PyErr_NoMemory();
        return -1;
    }
}
inline void unwatch_forks(PyObject* object) noexcept { TurnsInChild::all().remove(object); }

// Numbers that several threads count, each with a turn at another object.
template <class T>
T count_by(T& number, T more) noexcept { return __atomic_add_fetch(&number, more, __ATOMIC_SEQ_CST); }
template <class T>
T counted(const T& number) noexcept { return __atomic_load_n(&number, __ATOMIC_SEQ_CST); }
template <class T>
void put(T& number, T value) noexcept { __atomic_store_n(&number, value, __ATOMIC_SEQ_CST); }

// For an object that all threads refer to: they do not count that, which would have them wait for one another.
inline void keep_for_ever(PyObject* object) noexcept {
    Py_INCREF(object);
    __atomic_store_n(&object->ob_ref_local, UINT32_MAX, __ATOMIC_RELAXED);
}

// C functions in front of those of a type's methods. A method's definition has no room for what is behind, so each of
// these functions serves one method.
template <class... Rest>
class Guards {
public:
    using Method = PyObject* (*)(PyObject* self, Rest... rest);
    // The function to put there; null where there are no more.
    static Method before(PyCFunction method) noexcept {
        if (used_ == kMost) return nullptr;
        methods_[used_] = reinterpret_cast<Method>(reinterpret_cast<void (*)()>(method));
        return choose(used_++, std::make_integer_sequence<int, kMost>());
    }

private:
    static constexpr int kMost = 160;
    template <int number>
    static PyObject* call(PyObject* self, Rest... rest) {
        const TurnAt turn(self);
        return methods_[number](self, rest...);
    }
    template <int... numbers>
    static Method choose(int number, std::integer_sequence<int, numbers...>) noexcept {
        static constexpr Method calls[] = {&call<numbers>...};
        return calls[number];
    }
    static inline Method methods_[kMost];
    static inline int used_ = 0;
};

struct GuardedProperty {
    getter get;
    setter set;
    void* closure;
};

inline PyObject* get_in_turn(PyObject* self, void* of) {
    const GuardedProperty* property = static_cast<GuardedProperty*>(of);
    const TurnAt turn(self);
    return property->get(self, property->closure);
}

inline int set_in_turn(PyObject* self, PyObject* value, void* of) {
    const GuardedProperty* property = static_cast<GuardedProperty*>(of);
    const TurnAt turn(self);
    return property->set(self, value, property->closure);
}

inline bool guard_method(PyMethodDef* method) noexcept {
    const int kind = method->ml_flags & (METH_VARARGS | METH_KEYWORDS | METH_NOARGS | METH_O | METH_FASTCALL);
    void (*made)() = nullptr;
    if (kind == (METH_FASTCALL | METH_KEYWORDS))
        made = reinterpret_cast<void (*)()>(Guards<PyObject* const*, Py_ssize_t, PyObject*>::before(method->ml_meth));
    else if (kind == METH_FASTCALL)
        made = reinterpret_cast<void (*)()>(Guards<PyObject* const*, Py_ssize_t>::before(method->ml_meth));
    else if (kind == (METH_VARARGS | METH_KEYWORDS))
        made = reinterpret_cast<void (*)()>(Guards<PyObject*, PyObject*>::before(method->ml_meth));
    else if (kind == METH_NOARGS || kind == METH_O || kind == METH_VARARGS)
        made = reinterpret_cast<void (*)()>(Guards<PyObject*>::before(method->ml_meth));
    if (made != nullptr) method->ml_meth = reinterpret_cast<PyCFunction>(made);
    return made != nullptr;
}

inline bool is_among(const char* name, const char* names) noexcept {    // between spaces
    const size_t length = std::strlen(name);
    for (const char* at = names; (at = std::strstr(at, name)) != nullptr; at += length)
        if ((at == names || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) return true;
    return false;
}

// From now on each method and property of an extension type has a turn at its object, but for those that are named. To
// be called when the type is new. Returns -1 with Python's error set.
inline int take_turns(PyObject* of, const char* but) noexcept {
    PyTypeObject* type = reinterpret_cast<PyTypeObject*>(of);
    for (PyMethodDef* method = type->tp_methods; method != nullptr && method->ml_name != nullptr; ++method) {
        if (method->ml_flags & (METH_STATIC | METH_CLASS) || is_among(method->ml_name, but)) continue;
        if (!guard_method(method)) {
            PyErr_Format(PyExc_ImportError, "raise kMost: %s.%s is one too many", type->tp_name, method->ml_name);
            return -1;
        }
    }
    for (PyGetSetDef* property = type->tp_getset; property != nullptr && property->name != nullptr; ++property) {
        if (is_among(property->name, but)) continue;
        void* kept = PyMem_Malloc(sizeof(GuardedProperty));     // as long as the type, which is for ever
        if (kept == nullptr) {
            PyErr_NoMemory();
            return -1;
        }
        *static_cast<GuardedProperty*>(kept) = {property->get, property->set, property->closure};
        property->closure = kept;
        if (property->get != nullptr) property->get = get_in_turn;
        if (property->set != nullptr) property->set = set_in_turn;
    }
    return 0;
}

#else

class TurnAt {
public:
    void take(PyObject*) noexcept {}
};

template <class T>
T count_by(T& number, T more) noexcept { return number += more; }
template <class T>
T counted(const T& number) noexcept { return number; }
template <class T>
void put(T& number, T value) noexcept { number = value; }

inline void keep_for_ever(PyObject*) noexcept {}
inline int watch_forks(PyObject*) noexcept { return 0; }
inline void unwatch_forks(PyObject*) noexcept {}
inline int take_turns(PyObject*, const char*) noexcept { return 0; }

#endif

}  // namespace bfc
