/* Primary and created contexts, and the stack of current ones that each thread has. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

static const size_t first_limits[16] = {1024, 1 << 20, 8 << 20, 2, 2048, 128, 0};

static struct context *context_find(CUcontext handle)
{
    const char *place = (const char *)handle, *first = (const char *)machine.primaries;
    if (place >= first && place < first + sizeof machine.primaries)
        return (size_t)(place - first) % sizeof(struct context) ? NULL : handle;
    return slab_find(&machine.contexts, handle);
}

static void context_begin(struct context *context, int device, bool primary)
{
    context->state = ALIVE;
    context->device = device;
    context->primary = primary;
    context->id = ++machine.next_id;
    context->peers = 0;
    context->streams = context->legacy = NULL;
    memcpy(context->limits, first_limits, sizeof first_limits);
}

/* A library that holds the handle from before the machine was made anew cannot know that: its
 * first use of the handle counts as its retain. */
static bool adopt(struct context *context)
{
    if (!context->primary || !context->adoptable || context->device >= machine.device_count)
        return false;
    context_begin(context, context->device, true);
    context->adopted = true;
    return true;
}

CUresult context_check(struct context *handle)
{
    struct context *context = context_find(handle);
    if (!context || (context->state == UNUSED && !context->adoptable))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context->state == ALIVE || adopt(context))
        return CUDA_SUCCESS;
    return CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

struct context *context_current(CUresult *why)
{
    struct thread *thread = thread_now();
    struct context *context = thread->depth ? thread->stack[thread->depth - 1] : NULL;
    *why = CUDA_ERROR_INVALID_CONTEXT;
    if (!context)
        return NULL;
    *why = context_check(context);
    if (*why == CUDA_ERROR_CONTEXT_IS_DESTROYED)
        complain("a context was used after it was destroyed");
    return *why ? NULL : context;
}

/* Everything of the context goes: its memory, streams and events. */
void context_destroy(struct context *context, enum state state)
{
    for (struct stream *stream = context->streams, *next; stream; stream = next) {
        next = stream->next;
        stream_gone(stream, state);
    }
    context->streams = context->legacy = NULL;
    for (size_t i = 0; i < machine.events.high; i++) {
        struct event *event = (struct event *)(machine.events.base + i * machine.events.size);
        if (event->state == ALIVE && event->context == context)
            event_gone(event, state);
    }
    for (size_t i = machine.regions.count; i--;) {
        struct region *region = machine.regions.items[i];
        if (region->context == context && region->kind != MAPPED)
            region_free(region, state);
    }
    context->state = state == STALE ? UNUSED : state;
    context->adopted = false;
    pools_trim_idle(context->device);
    pthread_cond_broadcast(&machine.changed);
    work_pump();
}

API cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    struct call call = CALL("cuDevicePrimaryCtxRetain");
    BEGIN(call, STARTED);
    if (!out || !device_known(device))
        return emulator_end(&call, out ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE);
    struct context *context = &machine.primaries[device];
    if (context->state != ALIVE)
        context_begin(context, device, true);
    context->retained++;
    *out = context;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    struct call call = CALL("cuDevicePrimaryCtxRelease");
    BEGIN(call, STARTED);
    if (!device_known(device))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    struct context *context = &machine.primaries[device];
    bool held = context->retained || context->adopted;
    if (!held && context->adoptable) {
        context->adoptable = false;
        return emulator_end(&call, CUDA_SUCCESS);
    }
    if (!held) {
        complain("cuDevicePrimaryCtxRelease: device %d is not retained", device);
        return emulator_end(&call, CUDA_ERROR_INVALID_CONTEXT);
    }
    if (context->retained)
        context->retained--;
    else
        context->adopted = false;
    if (!context->retained && !context->adopted) {
        context->adoptable = false;
        if (context->state == ALIVE)
            context_destroy(context, DEAD);
    }
    return emulator_end(&call, CUDA_SUCCESS);
}

/* Whoever has retained the context still has to release it. */
API cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    struct call call = CALL("cuDevicePrimaryCtxReset");
    BEGIN(call, STARTED);
    if (!device_known(device))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    struct context *context = &machine.primaries[device];
    context->adoptable = false;
    if (context->state == ALIVE)
        context_destroy(context, DEAD);
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    struct call call = CALL("cuDevicePrimaryCtxGetState");
    BEGIN(call, STARTED);
    if (!device_known(device))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    if (flags)
        *flags = machine.primaries[device].flags;
    if (active)
        *active = machine.primaries[device].state == ALIVE;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    struct call call = CALL("cuDevicePrimaryCtxSetFlags");
    BEGIN(call, STARTED);
    if (!device_known(device))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    machine.primaries[device].flags = flags;
    return emulator_end(&call, CUDA_SUCCESS);
}

static CUresult create(struct call *call, CUcontext *out, unsigned flags, CUdevice device)
{
    BEGIN(*call, STARTED);
    if (!out || !device_known(device))
        return emulator_end(call, out ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE);
    struct thread *thread = thread_now();
    struct context *context = slab_take(&machine.contexts);
    if (!context || thread->depth == MAX_STACK)
        return emulator_end(call, CUDA_ERROR_OUT_OF_MEMORY);
    context_begin(context, device, false);
    context->flags = flags;
    thread->stack[thread->depth++] = context;
    *out = context;
    return emulator_end(call, CUDA_SUCCESS);
}

API cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device)
{
    struct call call = CALL("cuCtxCreate");
    return create(&call, out, flags, device);
}

API cuCtxCreate_v4(CUcontext *out, void *parameters, unsigned flags, CUdevice device)
{
    struct call call = CALL("cuCtxCreate");
    (void)parameters;
    return create(&call, out, flags, device);
}

API cuCtxDestroy_v2(CUcontext handle)
{
    struct call call = CALL("cuCtxDestroy");
    BEGIN(call, STARTED);
    struct context *context = context_find(handle);
    if (!context || context->primary)
        return emulator_end(&call, CUDA_ERROR_INVALID_CONTEXT);
    if (context->state == STALE)
        return emulator_end(&call, CUDA_SUCCESS);
    if (context->state != ALIVE) {
        complain("cuCtxDestroy: the context was destroyed before");
        return emulator_end(&call, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    struct thread *thread = thread_now();
    if (thread->depth && thread->stack[thread->depth - 1] == context)
        thread->depth--;
    context_destroy(context, DEAD);
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuCtxPushCurrent_v2(CUcontext handle)
{
    struct call call = CALL("cuCtxPushCurrent");
    BEGIN(call, STARTED);
    struct thread *thread = thread_now();
    CUresult result = context_check(handle);
    if (result == CUDA_ERROR_CONTEXT_IS_DESTROYED)
        complain("cuCtxPushCurrent: the context was destroyed");
    if (!result && thread->depth == MAX_STACK)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!result)
        thread->stack[thread->depth++] = handle;
    return emulator_end(&call, result);
}

API cuCtxPopCurrent_v2(CUcontext *out)
{
    struct call call = CALL("cuCtxPopCurrent");
    BEGIN(call, STARTED);
    struct thread *thread = thread_now();
    if (!thread->depth)
        return emulator_end(&call, CUDA_ERROR_INVALID_CONTEXT);
    thread->depth--;
    if (out)
        *out = thread->stack[thread->depth];
    return emulator_end(&call, CUDA_SUCCESS);
}

/* Replaces the top of the stack; no context at all empties it by one. */
API cuCtxSetCurrent(CUcontext handle)
{
    struct call call = CALL("cuCtxSetCurrent");
    BEGIN(call, STARTED);
    struct thread *thread = thread_now();
    CUresult result = handle ? context_check(handle) : CUDA_SUCCESS;
    if (result == CUDA_ERROR_CONTEXT_IS_DESTROYED)
        complain("cuCtxSetCurrent: the context was destroyed");
    if (!result && thread->depth)
        thread->depth--;
    if (!result && handle)
        thread->stack[thread->depth++] = handle;
    return emulator_end(&call, result);
}

API cuCtxGetCurrent(CUcontext *out)
{
    struct call call = CALL("cuCtxGetCurrent");
    BEGIN(call, STARTED);
    struct thread *thread = thread_now();
    if (!out)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    *out = thread->depth ? thread->stack[thread->depth - 1] : NULL;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuCtxGetDevice(CUdevice *out)
{
    struct call call = CALL("cuCtxGetDevice");
    BEGIN(call, CONTEXT);
    if (out)
        *out = call.context->device;
    return emulator_end(&call, out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

/* For calls that take a context, or null for the current one. */
static CUresult chosen(CUcontext handle, struct context **out)
{
    CUresult result = CUDA_SUCCESS;
    if (handle)
        result = context_check(*out = handle);
    else
        *out = context_current(&result);
    return *out ? (handle ? result : CUDA_SUCCESS) : result;
}

API cuCtxGetDevice_v2(CUdevice *out, CUcontext handle)
{
    struct call call = CALL("cuCtxGetDevice");
    struct context *context;
    BEGIN(call, STARTED);
    CUresult result = chosen(handle, &context);
    if (!result && out)
        *out = context->device;
    return emulator_end(&call, result);
}

API cuCtxGetId(CUcontext handle, unsigned long long *out)
{
    struct call call = CALL("cuCtxGetId");
    struct context *context;
    BEGIN(call, STARTED);
    CUresult result = chosen(handle, &context);
    if (!result && out)
        *out = context->id;
    return emulator_end(&call, result);
}

API cuCtxGetApiVersion(CUcontext handle, unsigned *out)
{
    struct call call = CALL("cuCtxGetApiVersion");
    struct context *context;
    BEGIN(call, STARTED);
    CUresult result = chosen(handle, &context);
    if (!result && out)
        *out = 3020;
    return emulator_end(&call, result);
}

API cuCtxGetFlags(unsigned *out)
{
    struct call call = CALL("cuCtxGetFlags");
    BEGIN(call, CONTEXT);
    if (out)
        *out = call.context->flags;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuCtxSetFlags(unsigned flags)
{
    struct call call = CALL("cuCtxSetFlags");
    BEGIN(call, CONTEXT);
    call.context->flags = flags;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuCtxGetLimit(size_t *out, unsigned limit)
{
    struct call call = CALL("cuCtxGetLimit");
    BEGIN(call, CONTEXT);
    if (!out || limit >= 16)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    *out = call.context->limits[limit];
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuCtxSetLimit(unsigned limit, size_t value)
{
    struct call call = CALL("cuCtxSetLimit");
    BEGIN(call, CONTEXT);
    if (limit >= 16)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    call.context->limits[limit] = value;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    struct call call = CALL("cuCtxGetStreamPriorityRange");
    BEGIN(call, CONTEXT);
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuCtxSynchronize(void)
{
    struct call call = CALL("cuCtxSynchronize");
    BEGIN(call, CONTEXT);
    CUresult result = capture_forbids_waiting(call.context);
    return emulator_end(&call, result ? result : wait_context(&call, call.context));
}

API cuCtxSynchronize_v2(CUcontext handle)
{
    struct call call = CALL("cuCtxSynchronize");
    struct context *context;
    BEGIN(call, STARTED);
    CUresult result = chosen(handle, &context);
    if (!result)
        result = capture_forbids_waiting(context);
    return emulator_end(&call, result ? result : wait_context(&call, context));
}

API cuDeviceCanAccessPeer(int *out, CUdevice device, CUdevice peer)
{
    struct call call = CALL("cuDeviceCanAccessPeer");
    BEGIN(call, STARTED);
    if (!device_known(device) || !device_known(peer))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    *out = device != peer && !machine.no_peers;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuCtxEnablePeerAccess(CUcontext handle, unsigned flags)
{
    struct call call = CALL("cuCtxEnablePeerAccess");
    BEGIN(call, CONTEXT);
    CUresult result = flags ? CUDA_ERROR_INVALID_VALUE : context_check(handle);
    if (!result && (machine.no_peers || handle->device == call.context->device))
        result = machine.no_peers ? CUDA_ERROR_PEER_ACCESS_UNSUPPORTED : CUDA_ERROR_INVALID_DEVICE;
    if (result)
        return emulator_end(&call, result);
    uint64_t bit = UINT64_C(1) << handle->device;
    if (call.context->peers & bit)
        return emulator_end(&call, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    call.context->peers |= bit;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuCtxDisablePeerAccess(CUcontext handle)
{
    struct call call = CALL("cuCtxDisablePeerAccess");
    BEGIN(call, CONTEXT);
    CUresult result = context_check(handle);
    if (result)
        return emulator_end(&call, result);
    uint64_t bit = UINT64_C(1) << handle->device;
    if (!(call.context->peers & bit))
        return emulator_end(&call, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    call.context->peers &= ~bit;
    return emulator_end(&call, CUDA_SUCCESS);
}
