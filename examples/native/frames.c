/* A module of Python in C that takes its memory from an allocator of bfc, by the table of C functions.
 *
 *   $ INCLUDE=$(python -c "import bfc; print(bfc.get_include())")
 *   $ cc -shared -fPIC frames.c -o frames.so -I$INCLUDE $(python3-config --includes)
 *   $ python use_frames.py
 *   3 frames of 6 MiB hold 18 MiB
 *   nothing is left
 *   no room: out of memory: asked for 1.00 GiB (1073741824 bytes)
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <bfc_allocator.h>

enum { FRAMES = 64 };

static const bfc_allocator *table;
static void *frames[FRAMES];
static int count;

static PyObject *serve(PyObject *module, PyObject *capsule) {
    const bfc_allocator *given = PyCapsule_GetPointer(capsule, BFC_ALLOCATOR_CAPSULE);
    if (given == NULL) return NULL; /* a TypeError or a ValueError is set */
    if (given->version != BFC_ALLOCATOR_VERSION || given->size < sizeof *given) {
        PyErr_SetString(PyExc_ImportError, "frames was compiled for another version of bfc");
        return NULL;
    }
    given->retain(given->self);
    if (table != NULL) table->release(table->self);
    table = given;
    Py_RETURN_NONE;
}

static PyObject *grab(PyObject *module, PyObject *size) {
    char why[4096];
    bfc_result result;
    size_t nbytes = PyLong_AsSize_t(size);
    if (PyErr_Occurred()) return NULL;
    if (table == NULL || count == FRAMES) {
        PyErr_SetString(PyExc_RuntimeError, table ? "all 64 frames are taken" : "call serve() first");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS /* as a thread that knows nothing of Python would call it */
    result = table->allocate(table->self, 0, nbytes, 0, &frames[count], why, sizeof why);
    Py_END_ALLOW_THREADS
    if (result != BFC_OK) {
        PyErr_SetString(result == BFC_OUT_OF_MEMORY ? PyExc_MemoryError : PyExc_RuntimeError, why);
        return NULL;
    }
    return PyLong_FromLong(++count);
}

static PyObject *drop_all(PyObject *module, PyObject *none) {
    while (count) table->free(table->self, frames[--count]);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"serve", serve, METH_O, "Take memory from the allocators of a capsule from now on."},
    {"grab", grab, METH_O, "Allocate a frame of so many bytes. Returns how many there are."},
    {"drop_all", drop_all, METH_NOARGS, "Free all frames."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "frames", NULL, -1, methods};

PyMODINIT_FUNC PyInit_frames(void) { return PyModule_Create(&definition); }
