/* Libraries, modules and launches. Code is taken and never run: a launch only stands in its stream's
 * queue, and what a kernel would have written is not there. */
#include "emulator.h"

#include <stdlib.h>

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
