// Python's plain ints, read without calling Python. For every other object the caller calls Python.
#pragma once

#include <Python.h>

#include <cstdint>

namespace bfc {

// Whether it is an int (no bool, no subclass) from 0 to 2**60 - 1, and which.
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

}  // namespace bfc
