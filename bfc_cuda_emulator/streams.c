/* Streams and their capture. */
#include "emulator.h"

#include <stdlib.h>

enum { NON_BLOCKING = 1, MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };

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

static void capture_invalidate(struct capture *capture)
{
    capture->invalid = true;
}

static void capture_end(struct capture *capture)
{
    for (size_t i = 0; i < machine.streams.high; i++) {
        struct stream *stream = (struct stream *)(machine.streams.base + i * machine.streams.size);
        if (stream->state != UNUSED && stream->capture == capture)
            stream->capture = NULL;
    }
    for (size_t i = 0; i < machine.captures; i++)
        if (machine.capture_list[i] == capture)
            machine.capture_list[i] = machine.capture_list[--machine.captures];
    free(capture);
}

/* The stream goes while it captures. Nobody could end a capture that began on it any more. */
static void capture_leave(struct stream *stream)
{
    if (!stream->capture)
        return;
    if (stream->capture->origin == stream)
        capture_end(stream->capture);
    else
        capture_invalidate(stream->capture);
    stream->capture = NULL;
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

/* What may not be called now, by the documented meaning of the three modes. */
CUresult capture_forbids(struct thread *thread)
{
    bool forbidden = false;
    for (size_t i = 0; i < machine.captures; i++) {
        struct capture *capture = machine.capture_list[i];
        bool own = capture->thread == thread->id && capture->mode != MODE_RELAXED;
        bool other = capture->mode == MODE_GLOBAL && thread->capture_mode == MODE_GLOBAL;
        if (thread->capture_mode == MODE_RELAXED || !(own || other))
            continue;
        capture_invalidate(capture);
        forbidden = true;
    }
    return forbidden ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

/* Work for a stream that captures goes into the graph. Work for the legacy stream would have to
 * wait for blocking streams that capture, which cannot be. */
CUresult capture_enter(struct stream *stream, bool *taken)
{
    *taken = stream->capture != NULL;
    if (*taken) {
        stream->capture->nodes++;
        return stream->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    }
    if (stream != stream->context->legacy)
        return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    for (struct stream *other = stream->context->streams; other; other = other->next)
        if (other->capture && stream_blocking(other)) {
            capture_invalidate(other->capture);
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return result;
}

void captures_reset(void)
{
    while (machine.captures)
        capture_end(machine.capture_list[0]);
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

/* Waiting for a stream that captures would wait for ever: the capture is spoilt instead. */
static CUresult not_capturing(struct stream *stream)
{
    if (!stream->capture)
        return CUDA_SUCCESS;
    capture_invalidate(stream->capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

API cuStreamQuery(CUstream handle)
{
    struct call call = CALL("cuStreamQuery", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result)
        result = not_capturing(stream);
    if (!result && work_pending(stream, machine.order))
        result = CUDA_ERROR_NOT_READY;
    return emulator_end(&call, result);
}

API cuStreamSynchronize(CUstream handle)
{
    struct call call = CALL("cuStreamSynchronize", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    bool taken;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result)
        result = not_capturing(stream);
    if (!result)
        result = capture_enter(stream, &taken);
    return emulator_end(&call, result ? result : wait_stream(&call, stream));
}

API cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags)
{
    struct call call = CALL("cuStreamWaitEvent", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    struct event *event = NULL;
    bool taken = false;
    BEGIN(call, STARTED);
    CUresult result = flags > 1 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (!result)
        result = stream_resolve(&call, handle, &stream);
    if (!result)
        result = event_find(&call, event_handle, &event);
    if (result)
        return emulator_end(&call, result);
    struct capture *capture = event_capture(event);
    if (capture && stream->capture && stream->capture != capture)
        return emulator_end(&call, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    if (capture) {
        stream->capture = capture; /* the stream joins */
        return emulator_end(&call, CUDA_SUCCESS);
    }
    if (stream->capture && event->record) {
        capture_invalidate(stream->capture);
        return emulator_end(&call, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    result = capture_enter(stream, &taken);
    if (result || taken || !event->record)
        return emulator_end(&call, result);
    struct work *work = work_new(&call, WAIT);
    if (!work)
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
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
    if (!result)
        result = capture_enter(stream, &taken);
    if (result || taken)
        return emulator_end(call, result);
    struct work *work = work_new(call, CALL_HOST);
    if (!work)
        return emulator_end(call, CUDA_ERROR_OUT_OF_MEMORY);
    work->function = model->function;
    work->callback = model->callback;
    work->argument = model->argument;
    work->handle = handle;
    return emulator_end(call, work_queue(work, stream));
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

API cuThreadExchangeStreamCaptureMode(int *mode)
{
    struct call call = CALL("cuThreadExchangeStreamCaptureMode");
    BEGIN(call, NOTHING);
    if (!mode || *mode < MODE_GLOBAL || *mode > MODE_RELAXED)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    struct thread *thread = thread_now();
    int before = thread->capture_mode;
    thread->capture_mode = *mode;
    *mode = before;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuStreamBeginCapture_v2(CUstream handle, int mode)
{
    struct call call = CALL("cuStreamBeginCapture", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (result)
        return emulator_end(&call, result);
    if (stream == stream->context->legacy)
        return emulator_end(&call, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    struct capture *capture = calloc(1, sizeof *capture);
    if (stream->capture || mode < MODE_GLOBAL || mode > MODE_RELAXED || !capture ||
        machine.captures == MAX_CAPTURES) {
        free(capture);
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    *capture = (struct capture){.id = ++machine.next_id, .mode = mode, .origin = stream,
                                .thread = thread_now()->id};
    machine.capture_list[machine.captures++] = capture;
    stream->capture = capture;
    return emulator_end(&call, CUDA_SUCCESS);
}

/* The graph is only a name: nothing can be launched. */
static void *graph_of(const struct capture *capture)
{
    return memory_at(capture->id << 12);
}

API cuStreamEndCapture(CUstream handle, void **graph)
{
    struct call call = CALL("cuStreamEndCapture", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (result)
        return emulator_end(&call, result);
    struct capture *capture = stream->capture;
    if (!capture || capture->origin != stream)
        return emulator_end(&call, capture ? CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
                                           : CUDA_ERROR_INVALID_VALUE);
    if (capture->mode != MODE_RELAXED && capture->thread != thread_now()->id)
        return emulator_end(&call, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    result = capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    if (graph)
        *graph = result ? NULL : graph_of(capture);
    capture_end(capture);
    return emulator_end(&call, result);
}

API cuGraphDestroy(void *graph)
{
    struct call call = CALL("cuGraphDestroy");
    BEGIN(call, STARTED);
    return emulator_end(&call, graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

static CUresult capture_status(struct call *call, CUstream handle, int *status, uint64_t *id,
                               void **graph)
{
    struct stream *stream = NULL;
    BEGIN(*call, STARTED);
    CUresult result = stream_resolve(call, handle, &stream);
    if (!result)
        *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    if (!result && id && stream->capture)
        *id = stream->capture->id;
    if (graph)
        *graph = !result && stream->capture ? graph_of(stream->capture) : NULL;
    return emulator_end(call, result);
}

API cuStreamIsCapturing(CUstream handle, int *status)
{
    struct call call = CALL("cuStreamIsCapturing", .stream = NUMBER(handle));
    return capture_status(&call, handle, status, NULL, NULL);
}

API cuStreamGetCaptureInfo_v2(CUstream handle, int *status, uint64_t *id, void **graph,
                              const void **nodes, size_t *count)
{
    struct call call = CALL("cuStreamGetCaptureInfo", .stream = NUMBER(handle));
    if (nodes)
        *nodes = NULL;
    if (count)
        *count = 0;
    return capture_status(&call, handle, status, id, graph);
}

API cuStreamGetCaptureInfo_v3(CUstream handle, int *status, uint64_t *id, void **graph,
                              const void **nodes, const void **edges, size_t *count)
{
    if (edges)
        *edges = NULL;
    return cuStreamGetCaptureInfo_v2(handle, status, id, graph, nodes, count);
}
