// Python's plain ints: read without calling Python, and kept where the same ones are asked for again and again.
#pragma once

#include <Python.h>

#include <cstdint>

namespace bfc {

// For every other object the caller calls Python. Whether it is an int (no bool, no subclass) from 0 to 2**60 - 1, and which.
inline bool small_int(PyObject* object, uint64_t* number) noexcept {
    if (!PyLong_CheckExact(object)) return false;
    static_assert(PyLong_SHIFT == 30, "two digits are 60 bits");
#if PY_VERSION_HEX >= 0x030C0000
    const digit* digits = reinterpret_cast<PyLongObject*>(object)->long_value.ob_digit;
    const uintptr_t tag = reinterpret_cast<PyLongObject*>(object)->long_value.lv_tag;
    if ((tag & 3) == 2 || tag >> 3 > 2) return false;       // negative, or longer
    const uintptr_t count = (tag & 3) == 1 ? 0 : tag >> 3;
#else
    const digit* digits = reinterpret_cast<PyLongObject*>(object)->ob_digit;
    const Py_ssize_t count = Py_SIZE(object);
    if (count < 0 || count > 2) return false;
#endif
    *number = count == 0 ? 0 : digits[0];
    if (count == 2) *number |= uint64_t{digits[1]} << 30;
    return true;
}

// The ints of addresses that were asked for before: a program that repeats gets the same ones, and making an int costs
// more than a hit. Needs the GIL, to be destroyed too. Without a GIL each is made anew: threads that take the same ones
// would wait for one another, to count their references.
class RecentInts {
public:
#ifdef Py_GIL_DISABLED
    PyObject* get(uint64_t number) noexcept { return PyLong_FromUnsignedLongLong(number); }
#else
    RecentInts() = default;
    RecentInts(const RecentInts&) = delete;
    RecentInts& operator=(const RecentInts&) = delete;
    ~RecentInts() {
        for (Entry& entry : entries_) Py_XDECREF(entry.object);
    }

    // A new reference. Null: Python has no memory, and its error is set.
    PyObject* get(uint64_t number) noexcept {
        Entry& entry = entries_[(number * uint64_t{0x9E3779B97F4A7C15}) >> (64 - kBits)];
        if (entry.object == nullptr || entry.number != number) {
            PyObject* made = PyLong_FromUnsignedLongLong(number);
            if (made == nullptr) return nullptr;
            Py_XSETREF(entry.object, made);
            entry.number = number;
        }
        Py_INCREF(entry.object);
        return entry.object;
    }

private:
    static constexpr int kBits = 6;
    struct Entry {
        uint64_t number = 0;
        PyObject* object = nullptr;
    };
    Entry entries_[1 << kBits];
#endif
};

}  // namespace bfc
