/* Libraries, modules and launches. Code is taken and never run: a launch only stands in its stream's
 * queue, and what a kernel would have written is not there. */
#include "emulator.h"

#include <stdlib.h>
#include <unistd.h>

/* Every library, kernel and function is a handle of its own, and none is forgotten. */
static CUresult give(struct call *call, int needs, const void *of, void **out)
{
    BEGIN(*call, needs);
    if (!of || !out)
        return emulator_end(call, CUDA_ERROR_INVALID_VALUE);
    *out = (void *)(uintptr_t)((++machine.next_id << 8) | 0x70000000000000);
    return emulator_end(call, CUDA_SUCCESS);
}

static CUresult take(struct call *call, const void *handle)
{
    BEGIN(*call, STARTED);
    return emulator_end(call, handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

API cuLibraryLoadData(void **out, const void *code, int *options, void **values, unsigned count,
                      int *more, void **others, unsigned number)
{
    struct call call = CALL("cuLibraryLoadData");
    (void)options, (void)values, (void)count, (void)more, (void)others, (void)number;
    return give(&call, STARTED, code, out);
}

API cuLibraryGetKernel(void **out, const void *library, const char *name)
{
    struct call call = CALL("cuLibraryGetKernel");
    return give(&call, STARTED, name ? library : NULL, out);
}

API cuLibraryUnload(const void *library)
{
    struct call call = CALL("cuLibraryUnload");
    return take(&call, library);
}

API cuKernelGetFunction(void **out, const void *kernel)
{
    struct call call = CALL("cuKernelGetFunction");
    return give(&call, CONTEXT, kernel, out);
}

API cuModuleLoadData(void **out, const void *code)
{
    struct call call = CALL("cuModuleLoadData");
    return give(&call, CONTEXT | UNSAFE, code, out);
}

API cuModuleLoadDataEx(void **out, const void *code, unsigned count, int *options, void **values)
{
    struct call call = CALL("cuModuleLoadDataEx");
    (void)count, (void)options, (void)values;
    return give(&call, CONTEXT | UNSAFE, code, out);
}

API cuModuleLoad(void **out, const char *path)
{
    struct call call = CALL("cuModuleLoad");
    bool found = path && access(path, R_OK) == 0;
    if (!path || found)
        return give(&call, CONTEXT | UNSAFE, path, out);
    BEGIN(call, CONTEXT | UNSAFE);
    return emulator_end(&call, CUDA_ERROR_FILE_NOT_FOUND);
}

API cuModuleGetFunction(void **out, const void *module, const char *name)
{
    struct call call = CALL("cuModuleGetFunction");
    return give(&call, CONTEXT, name ? module : NULL, out);
}

API cuModuleUnload(const void *module)
{
    struct call call = CALL("cuModuleUnload");
    return take(&call, module);
}

/* What the compiler would have said of the code: it takes no registers, and no memory of its own. */
API cuFuncGetAttribute(int *out, int attribute, const void *function)
{
    enum { MAX_THREADS_PER_BLOCK = 0, ATTRIBUTES = 16 };
    struct call call = CALL("cuFuncGetAttribute");
    BEGIN(call, CONTEXT);
    if (!function)
        return emulator_end(&call, CUDA_ERROR_INVALID_HANDLE);
    if (!out || attribute < 0 || attribute >= ATTRIBUTES)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    *out = attribute == MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuFuncSetAttribute(const void *function, int attribute, int value)
{
    struct call call = CALL("cuFuncSetAttribute");
    (void)attribute, (void)value;
    return take(&call, function);
}

API cuFuncSetCacheConfig(const void *function, int config)
{
    struct call call = CALL("cuFuncSetCacheConfig");
    (void)config;
    return take(&call, function);
}

API cuLaunchKernel(const void *function, unsigned width, unsigned height, unsigned depth,
                   unsigned across, unsigned down, unsigned deep, unsigned shared, CUstream handle,
                   void **arguments, void **extra)
{
    struct call call = CALL("cuLaunchKernel", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    bool taken = false;
    (void)shared, (void)arguments, (void)extra;
    BEGIN(call, CONTEXT);
    CUresult result = function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    if (!width || !height || !depth || !across || !down || !deep || across * down * deep > 1024)
        result = CUDA_ERROR_INVALID_VALUE;
    if (!result)
        result = stream_resolve(&call, handle, &stream);
    if (!result)
        result = capture_enter(stream, &taken);
    struct work *work = result ? NULL : work_new(&call, LAUNCH);
    if (!work)
        return emulator_end(&call, result ? result : CUDA_ERROR_OUT_OF_MEMORY);
    return emulator_end(&call, taken ? capture_add(work, stream) : work_queue(work, stream));
}
