// An allocator of bfc for a program in C++ that is not Python's: `bfc::open` starts an interpreter in this process, once,
// and returns the table of C functions. From then on any thread may call the table, and needs to know nothing of Python.
//
//     c++ -std=c++17 -pthread engine.cpp -I<bfc.get_include()> $(python3-config --includes --embed --ldflags)
//
// The interpreter must find bfc: set PYTHONPATH to the folder that has it, or install it for that Python. It stays
// until the process ends. docs/design/without-python.md says why an allocator needs one, and what it costs.
#ifndef BFC_EMBED_HPP
#define BFC_EMBED_HPP

#include <Python.h>
#include <bfc_allocator.h>

#include <stdexcept>
#include <string>

namespace bfc {

// Memory that the program has. An allocator asks for large blocks, from any thread, and never while it holds a lock.
struct Source {
    void* self;             // the first argument of both functions
    size_t total_bytes;     // all that there is: the allocator's limit, unless it is given a lower one
    // A block of `nbytes` bytes at a multiple of `alignment`; nullptr if there is no room.
    void* (*alloc)(void* self, size_t alignment, size_t nbytes);
    void (*free)(void* self, void* ptr, size_t nbytes);
    size_t is_host = 1;     // 0: the host cannot read and write the memory
};

namespace detail {

constexpr const char* kOpen = R"(
import ctypes
import bfc
from bfc.integrations.torch_backend import capsule

class Source(bfc.SubAllocator):
    def __init__(self, fields):
        self.owner, self.total_bytes, alloc, free, is_host = fields
        self.device = bfc.Device("cpu" if is_host else "simulated")
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self.ask = ctypes.CFUNCTYPE(pointer, pointer, size, size)(alloc)
        self.give_back = ctypes.CFUNCTYPE(None, pointer, pointer, size)(free)

    def __repr__(self):
        return "the program's memory"

    def alloc(self, alignment, nbytes):
        address = self.ask(self.owner, alignment, nbytes)
        return (address, nbytes) if address else None

    def free(self, address, nbytes):
        self.give_back(self.owner, address, nbytes)

def open_table(pool, fields):
    source = Source(fields) if fields else None
    return capsule([eval(pool, {"bfc": bfc, "source": source})])
)";

// What Python raised, in one line.
inline std::string raised() {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    PyObject* text = error ? PyObject_Str(error) : nullptr;
    const char* said = text ? PyUnicode_AsUTF8(text) : nullptr;
    std::string line = kind ? reinterpret_cast<PyTypeObject*>(kind)->tp_name : "an unknown error";
    if (said) line = line + ": " + said;
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return line;
}

// The table, retained; nullptr with an exception of Python's set. Needs the GIL.
inline const bfc_allocator* evaluate(const char* pool, const Source* source) {
    PyObject* names = PyDict_New();
    PyObject* done = nullptr;
    PyObject* capsule = nullptr;
    if (names && PyDict_SetItemString(names, "__builtins__", PyEval_GetBuiltins()) == 0)
        done = PyRun_String(kOpen, Py_file_input, names, names);
    if (done && source)
        capsule = PyObject_CallFunction(PyDict_GetItemString(names, "open_table"), "s(nnnnn)", pool, source->self,
                                        source->total_bytes, source->alloc, source->free, source->is_host);
    else if (done)
        capsule = PyObject_CallFunction(PyDict_GetItemString(names, "open_table"), "sO", pool, Py_None);
    const bfc_allocator* table = nullptr;
    if (capsule) table = static_cast<const bfc_allocator*>(PyCapsule_GetPointer(capsule, BFC_ALLOCATOR_CAPSULE));
    if (table) table->retain(table->self);
    Py_XDECREF(capsule);
    Py_XDECREF(done);
    Py_XDECREF(names);
    return table;
}

}  // namespace detail

// Opens an allocator. `pool` is an expression of Python that makes it, such as
// "bfc.CachingAllocator(bfc.HostSubAllocator('1 GiB'))"; in it the name `source` is the caller's memory, if there is any.
// Throws std::runtime_error with what Python says. `table->release(table->self)` closes the allocator.
inline const bfc_allocator* open(const char* pool, const Source* source = nullptr) {
    const bool is_first = !Py_IsInitialized();
    if (is_first) Py_InitializeEx(0);  // which leaves the program's signal handlers alone
    const PyGILState_STATE state = is_first ? PyGILState_UNLOCKED : PyGILState_Ensure();
    const bfc_allocator* table = detail::evaluate(pool, source);
    const std::string why = table ? "" : detail::raised();
    if (is_first)
        PyEval_SaveThread();  // the GIL is free from here on, for whichever thread needs it
    else
        PyGILState_Release(state);
    if (!table) throw std::runtime_error(why);
    return table;
}

}  // namespace bfc
#endif
