/* Captures: what is put into a graph while a stream captures, and what may not be called meanwhile.
 *
 * Each stream of a capture has the nodes that its next one will depend on, its terminals. */
#include "emulator.h"

#include <stdlib.h>

enum { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };
enum { SET_DEPENDENCIES = 1, MAX_TERMINALS = 4096 };

void capture_invalidate(struct capture *capture)
{
    capture->invalid = true;
}

static void leave(struct stream *stream)
{
    stream->capture = NULL;
    nodes_clear(&stream->terminals);
}

/* The streams are free again. The graph goes unless the caller has taken it out. */
static void capture_end(struct capture *capture)
{
    for (size_t i = 0; i < machine.streams.high; i++) {
        struct stream *stream = (struct stream *)(machine.streams.base + i * machine.streams.size);
        if (stream->state != UNUSED && stream->capture == capture)
            leave(stream);
    }
    for (size_t i = 0; i < machine.captures; i++)
        if (machine.capture_list[i] == capture)
            machine.capture_list[i] = machine.capture_list[--machine.captures];
    nodes_clear(&capture->left);
    if (capture->graph)
        graph_gone(capture->graph, DEAD);
    free(capture);
}

/* The stream goes while it captures. Nobody could end a capture that began on it any more. Another
 * one may go once it is joined: cuda.core destroys branches of a graph so. */
void capture_leave(struct stream *stream)
{
    if (!stream->capture)
        return;
    if (stream->capture->origin == stream) {
        capture_end(stream->capture);
        return;
    }
    if (!nodes_add_all(&stream->capture->left, &stream->terminals))
        capture_invalidate(stream->capture);
    leave(stream);
}

void captures_reset(void)
{
    while (machine.captures)
        capture_end(machine.capture_list[0]);
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

/* Waiting for all streams of a context would wait for those that capture, whatever the mode. */
CUresult capture_forbids_waiting(const struct context *context)
{
    CUresult result = CUDA_SUCCESS;
    for (struct stream *stream = context->streams; stream; stream = stream->next)
        if (stream->capture) {
            capture_invalidate(stream->capture);
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return result;
}

/* Nobody may ask after an event that was recorded in a capture. */
CUresult capture_forbids_asking(const struct event *event)
{
    struct capture *capture = event_capture(event);
    if (capture)
        capture_invalidate(capture);
    return event->captured ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
}

/* The legacy stream would have to wait for blocking streams that capture, which cannot be. To ask
 * whether it captures is an error as well, but spoils nothing. */
static CUresult legacy_forbidden(const struct stream *stream, bool spoils)
{
    CUresult result = CUDA_SUCCESS;
    if (stream != stream->context->legacy)
        return CUDA_SUCCESS;
    for (struct stream *other = stream->context->streams; other; other = other->next)
        if (other->capture && stream_blocking(other)) {
            if (spoils)
                capture_invalidate(other->capture);
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return result;
}

/* Work for a stream that captures goes into the graph. */
CUresult capture_enter(struct stream *stream, bool *taken)
{
    *taken = stream->capture != NULL;
    if (*taken)
        return stream->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    return legacy_forbidden(stream, true);
}

/* A stream that captures is neither waited for nor asked how far it is, nor is the legacy stream
 * that would have to wait for it. */
CUresult capture_forbids_stream(struct stream *stream)
{
    if (!stream->capture)
        return legacy_forbidden(stream, true);
    capture_invalidate(stream->capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* Puts work into the graph, behind the terminals of its stream. The work is gone afterwards. */
CUresult capture_add(struct work *work, struct stream *stream)
{
    struct node *node = graph_add(stream->capture->graph, work, &stream->terminals);
    free(work);
    if (!node)
        return CUDA_ERROR_OUT_OF_MEMORY;
    nodes_clear(&stream->terminals);
    return nodes_add(&stream->terminals, node) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* The event marks what the stream has captured. No node stands for it. */
CUresult capture_record(struct event *event, const struct stream *stream)
{
    event->captured = stream->capture->id;
    nodes_clear(&event->nodes);
    return nodes_add_all(&event->nodes, &stream->terminals) ? CUDA_SUCCESS
                                                            : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Lets a stream wait for an event where one of the two belongs to a capture: `joined` then. */
CUresult capture_wait(struct stream *stream, const struct event *event, bool *joined)
{
    struct capture *capture = event_capture(event);
    *joined = capture || stream->capture;
    if (capture && stream->capture && stream->capture != capture) {
        capture_invalidate(capture);
        capture_invalidate(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (stream->capture && stream->capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!capture && stream->capture && event->record) {
        capture_invalidate(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!capture)
        return CUDA_SUCCESS;
    if (stream == stream->context->legacy) {
        capture_invalidate(capture);
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT; /* it joins none */
    }
    stream->capture = capture;
    return nodes_add_all(&stream->terminals, &event->nodes) ? CUDA_SUCCESS
                                                            : CUDA_ERROR_OUT_OF_MEMORY;
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
    if (stream->capture || mode < MODE_GLOBAL || mode > MODE_RELAXED ||
        machine.captures == MAX_CAPTURES)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    struct capture *capture = calloc(1, sizeof *capture);
    struct graph *graph = capture ? graph_new() : NULL;
    if (!graph) {
        free(capture);
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    }
    *capture = (struct capture){.id = ++machine.next_id, .mode = mode, .origin = stream,
                                .thread = thread_now()->id, .graph = graph};
    machine.capture_list[machine.captures++] = capture;
    stream->capture = capture;
    return emulator_end(&call, CUDA_SUCCESS);
}

/* Does a stream end in nodes that the first stream does not come after? */
static bool is_unjoined(const struct capture *capture)
{
    bool unjoined = false;
    nodes_mark(capture->graph, &capture->origin->terminals);
    for (size_t i = 0; i < capture->left.count; i++)
        unjoined |= !capture->left.items[i]->marked;
    for (size_t i = 0; i < machine.streams.high; i++) {
        const struct stream *stream =
            (const struct stream *)(machine.streams.base + i * machine.streams.size);
        if (stream->state == UNUSED || stream->capture != capture)
            continue;
        for (size_t j = 0; j < stream->terminals.count; j++)
            unjoined |= !stream->terminals.items[j]->marked;
    }
    return unjoined;
}

API cuStreamEndCapture(CUstream handle, CUgraph *graph)
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
    result = capture->invalid        ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
             : is_unjoined(capture) ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                     : CUDA_SUCCESS;
    if (graph)
        *graph = result ? NULL : capture->graph;
    if (!result)
        capture->graph = NULL; /* the caller has it */
    capture_end(capture);
    return emulator_end(&call, result);
}

static CUresult find_capturing(struct call *call, CUstream handle, struct stream **stream)
{
    CUresult result = stream_resolve(call, handle, stream);
    return result ? result : legacy_forbidden(*stream, false);
}

static int status_of(const struct stream *stream)
{
    return !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
}

API cuStreamIsCapturing(CUstream handle, int *status)
{
    struct call call = CALL("cuStreamIsCapturing", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_capturing(&call, handle, &stream);
    if (!result)
        *status = status_of(stream);
    return emulator_end(&call, result);
}

API cuStreamGetCaptureInfo_v2(CUstream handle, int *status, uint64_t *id, CUgraph *graph,
                              const CUgraphNode **nodes, size_t *count)
{
    struct call call = CALL("cuStreamGetCaptureInfo", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = find_capturing(&call, handle, &stream);
    const struct capture *capture = result ? NULL : stream->capture;
    if (!result)
        *status = status_of(stream);
    if (id && capture)
        *id = capture->id;
    if (graph)
        *graph = capture ? capture->graph : NULL;
    if (nodes)
        *nodes = capture ? stream->terminals.items : NULL;
    if (count)
        *count = capture ? stream->terminals.count : 0;
    return emulator_end(&call, result);
}

API cuStreamGetCaptureInfo_v3(CUstream handle, int *status, uint64_t *id, CUgraph *graph,
                              const CUgraphNode **nodes, const struct edge **edges, size_t *count)
{
    static const struct edge plain[MAX_TERMINALS];
    size_t number = 0;
    CUresult result =
        cuStreamGetCaptureInfo_v2(handle, status, id, graph, nodes, count ? count : &number);
    if (edges)
        *edges = plain;
    return !result && count && *count > MAX_TERMINALS ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

API cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode *list, size_t count,
                                      unsigned flags)
{
    struct call call = CALL("cuStreamUpdateCaptureDependencies", .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result && !stream->capture)
        result = CUDA_ERROR_ILLEGAL_STATE;
    else if (!result && stream->capture->invalid)
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    for (size_t i = 0; !result && i < count; i++)
        if (!list[i] || list[i]->state != ALIVE || list[i]->graph != stream->capture->graph)
            result = CUDA_ERROR_INVALID_VALUE;
    if (!result && flags > SET_DEPENDENCIES)
        result = CUDA_ERROR_INVALID_VALUE;
    if (!result && flags == SET_DEPENDENCIES)
        nodes_clear(&stream->terminals);
    for (size_t i = 0; !result && i < count; i++)
        result = nodes_add(&stream->terminals, list[i]) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    return emulator_end(&call, result);
}

API cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode *list,
                                         const struct edge *edges, size_t count, unsigned flags)
{
    (void)edges;
    return cuStreamUpdateCaptureDependencies(handle, list, count, flags);
}
