/* Streams. */
#include "emulator.h"

#include <stdlib.h>

enum { NON_BLOCKING = 1, WAIT_EXTERNAL = 1 };

bool stream_blocking(const struct stream *stream)
{
    return !(stream->flags & NON_BLOCKING);
}

static struct stream *stream_new(struct context *context, unsigned flags, int priority)
{
    struct stream *stream = slab_take(&machine.streams);
    if (!stream)
        return NULL;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->id = ++machine.next_id;
    stream->next = context->streams;
    context->streams = stream;
    return stream;
}

/* Takes the stream out of its context. Work that is left keeps a destroyed stream until it ran. */
void stream_close(struct stream *stream, enum state state)
{
    if (stream->busy) {
        stream->state = CLOSED;
        return;
    }
    struct stream **link = &stream->context->streams;
    while (*link && *link != stream)
        link = &(*link)->next;
    if (*link)
        *link = stream->next;
    stream->state = state;
}

/* The context goes, and the work with it. */
void stream_gone(struct stream *stream, enum state state)
{
    capture_leave(stream);
    bool closed = stream->state == CLOSED;
    stream->state = state;
    work_drop(stream);
    stream->state = closed ? DEAD : state;
}

/* The legacy stream and those of the threads begin to exist when they are first named. */
struct stream *stream_special(struct context *context, CUstream handle)
{
    if (handle != PER_THREAD_STREAM) {
        if (!context->legacy)
            context->legacy = stream_new(context, 0, 0);
        return context->legacy;
    }
    uint64_t owner = thread_now()->id;
    for (struct stream *stream = context->streams; stream; stream = stream->next)
        if (stream->owner == owner)
            return stream;
    struct stream *stream = stream_new(context, 0, 0);
    if (stream)
        stream->owner = owner;
    return stream;
}

CUresult stream_resolve(struct call *call, CUstream handle, struct stream **out)
{
    CUresult result = CUDA_SUCCESS;
    if (!handle || handle == LEGACY_STREAM || handle == PER_THREAD_STREAM) {
        struct context *context = context_current(&result);
        if (!context)
            return result;
        *out = stream_special(context, handle);
        return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = slab_find(&machine.streams, handle);
    if (!*out) {
        complain("%s: 0x%llx is no stream", call->name, (unsigned long long)NUMBER(handle));
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if ((*out)->state == ALIVE)
        return CUDA_SUCCESS;
    if ((*out)->state != STALE)
        complain("%s: stream 0x%llx was destroyed", call->name, (unsigned long long)NUMBER(handle));
    return CUDA_ERROR_INVALID_HANDLE;
}

static CUresult create(struct call *call, CUstream *out, unsigned flags, int priority)
{
    BEGIN(*call, CONTEXT);
    if (!out || flags > NON_BLOCKING)
        return emulator_end(call, CUDA_ERROR_INVALID_VALUE);
    priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    struct stream *stream = stream_new(call->context, flags, priority);
    *out = stream;
    call->stream = NUMBER(stream);
    return emulator_end(call, stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

API cuStreamCreate(CUstream *out, unsigned flags)
{
    struct call call = CALL("cuStreamCreate");
    return create(&call, out, flags, 0);
}

API cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    struct call call = CALL("cuStreamCreateWithPriority");
    return create(&call, out, flags, priority);
}

API cuStreamDestroy_v2(CUstream handle)
{
    struct call call = CALL("cuStreamDestroy", .stream = NUMBER(handle));
    BEGIN(call, STARTED);
    struct stream *stream = slab_find(&machine.streams, handle);
    if (stream && stream->state == STALE)
        return emulator_end(&call, CUDA_SUCCESS);
    if (!stream || stream->state != ALIVE || stream->owner || stream == stream->context->legacy) {
        complain("cuStreamDestroy: 0x%llx %s", (unsigned long long)NUMBER(handle),
                 stream && stream->state != ALIVE ? "was destroyed before" : "is no stream");
        return emulator_end(&call, CUDA_ERROR_INVALID_HANDLE);
    }
    capture_leave(stream);
    stream_close(stream, DEAD);
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuStreamQuery(CUstream handle)
{
    struct call call = CALL("cuStreamQuery", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result)
        result = capture_forbids_stream(stream);
    if (!result)
        result = capture_forbids(thread_now());
    if (!result && work_pending(stream, machine.order))
        result = CUDA_ERROR_NOT_READY;
    return emulator_end(&call, result);
}

API cuStreamSynchronize(CUstream handle)
{
    struct call call = CALL("cuStreamSynchronize", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result)
        result = capture_forbids_stream(stream);
    if (!result)
        result = capture_forbids(thread_now());
    return emulator_end(&call, result ? result : wait_stream(&call, stream));
}

API cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags)
{
    struct call call = CALL("cuStreamWaitEvent", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    struct event *event = NULL;
    bool taken = false, joined = false;
    BEGIN(call, STARTED);
    CUresult result = flags > 1 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (!result)
        result = stream_resolve(&call, handle, &stream);
    if (!result)
        result = event_find(&call, event_handle, &event);
    if (result)
        return emulator_end(&call, result);
    if (flags != WAIT_EXTERNAL)
        result = capture_wait(stream, event, &joined);
    if (result || joined)
        return emulator_end(&call, result);
    result = capture_enter(stream, &taken);
    if (!result && !taken)
        result = mark_wait(&call, event);
    if (result || !(event->record || taken))
        return emulator_end(&call, result);
    struct work *work = work_new(&call, WAIT);
    if (!work)
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    if (taken) {
        work->event = event;
        return emulator_end(&call, capture_add(work, stream));
    }
    work->record = event->record;
    work->record->users++;
    return emulator_end(&call, work_queue(work, stream));
}

static CUresult queue_call(struct call *call, CUstream handle, struct work *model)
{
    struct stream *stream = NULL;
    bool taken = false;
    BEGIN(*call, STARTED);
    CUresult result = stream_resolve(call, handle, &stream);
    if (!result && model->callback)
        result = capture_forbids_stream(stream); /* a graph calls host functions only */
    if (!result)
        result = capture_enter(stream, &taken);
    if (result)
        return emulator_end(call, result);
    struct work *work = work_new(call, CALL_HOST);
    if (!work)
        return emulator_end(call, CUDA_ERROR_OUT_OF_MEMORY);
    work->function = model->function;
    work->callback = model->callback;
    work->argument = model->argument;
    work->handle = handle;
    return emulator_end(call, taken ? capture_add(work, stream) : work_queue(work, stream));
}

API cuLaunchHostFunc(CUstream handle, CUhostFn function, void *argument)
{
    struct call call = CALL("cuLaunchHostFunc", .stream = NUMBER(handle));
    return queue_call(&call, handle, &(struct work){.function = function, .argument = argument});
}

API cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void *argument, unsigned flags)
{
    struct call call = CALL("cuStreamAddCallback", .stream = NUMBER(handle));
    (void)flags;
    return queue_call(&call, handle, &(struct work){.callback = callback, .argument = argument});
}

API cuStreamGetId(CUstream handle, unsigned long long *out)
{
    struct call call = CALL("cuStreamGetId", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result && stream->capture)
        result = capture_forbids_stream(stream); /* as driver 580 does, in every mode */
    if (!result && out)
        *out = stream->id;
    return emulator_end(&call, result);
}

API cuStreamGetCtx(CUstream handle, CUcontext *out)
{
    struct call call = CALL("cuStreamGetCtx", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result && out)
        *out = stream->context;
    return emulator_end(&call, result);
}

API cuStreamGetCtx_v2(CUstream handle, CUcontext *out, void **green)
{
    if (green)
        *green = NULL;
    return cuStreamGetCtx(handle, out);
}

API cuStreamGetDevice(CUstream handle, CUdevice *out)
{
    struct call call = CALL("cuStreamGetDevice", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result && out)
        *out = stream->context->device;
    return emulator_end(&call, result);
}

API cuStreamGetFlags(CUstream handle, unsigned *out)
{
    struct call call = CALL("cuStreamGetFlags", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result && out)
        *out = stream->flags;
    return emulator_end(&call, result);
}

API cuStreamGetPriority(CUstream handle, int *out)
{
    struct call call = CALL("cuStreamGetPriority", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result && out)
        *out = stream->priority;
    return emulator_end(&call, result);
}
