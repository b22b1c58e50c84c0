// A function in front of a method of an extension type: it serves the method's plainest call, and leaves all others to the
// method. Cython's code to read arguments that may come by keyword, and that it counts references to, takes as long as half
// a hit.
#pragma once

#include <Python.h>

namespace bfc {

using Arguments = PyObject* const*;
using Method = PyObject* (*)(PyObject* self, Arguments given, Py_ssize_t count, PyObject* names);

// Returns the method itself, for what `quick` does not serve. Null: it takes its arguments in another way, and stays alone;
// or there is none, and Python's error is set.
inline Method put_in_front(PyTypeObject* type, const char* name, Method quick) {
    PyObject* found = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
    if (found == nullptr) return nullptr;
    Method method = nullptr;
    if (Py_IS_TYPE(found, &PyMethodDescr_Type)) {
        PyMethodDef* definition = reinterpret_cast<PyMethodDescrObject*>(found)->d_method;
        if (definition->ml_flags == (METH_FASTCALL | METH_KEYWORDS)) {
            method = reinterpret_cast<Method>(reinterpret_cast<void (*)()>(definition->ml_meth));
            definition->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(quick));
        }
    }
    Py_DECREF(found);   // the type keeps it
    return method;
}

}  // namespace bfc
