/* Events: marks in the work of a stream. */
#include "emulator.h"

#include <stdlib.h>

enum { DISABLE_TIMING = 2, ALL_FLAGS = 7, RECORD_EXTERNAL = 1 };

CUresult event_find(struct call *call, CUevent handle, struct event **out)
{
    struct event *event = slab_find(&machine.events, handle);
    *out = event;
    if (event && event->state == ALIVE)
        return CUDA_SUCCESS;
    if (!event)
        complain("%s: 0x%llx is no event", call->name, (unsigned long long)NUMBER(handle));
    else if (event->state != STALE)
        complain("%s: event 0x%llx was destroyed", call->name, (unsigned long long)NUMBER(handle));
    return CUDA_ERROR_INVALID_HANDLE;
}

/* The capture that the event was last recorded in, while it lasts. */
struct capture *event_capture(const struct event *event)
{
    for (size_t i = 0; i < machine.captures; i++)
        if (event->captured && machine.capture_list[i]->id == event->captured)
            return machine.capture_list[i];
    return NULL;
}

void event_gone(struct event *event, enum state state)
{
    record_release(event->record);
    event->record = NULL;
    nodes_clear(&event->nodes);
    event->state = state;
}

API cuEventCreate(CUevent *out, unsigned flags)
{
    struct call call = CALL("cuEventCreate");
    BEGIN(call, CONTEXT);
    if (!out || flags > ALL_FLAGS)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    struct event *event = slab_take(&machine.events);
    if (!event)
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    event->context = call.context;
    event->flags = flags;
    *out = event;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuEventDestroy_v2(CUevent handle)
{
    struct call call = CALL("cuEventDestroy");
    BEGIN(call, STARTED);
    struct event *event = slab_find(&machine.events, handle);
    if (event && event->state == STALE)
        return emulator_end(&call, CUDA_SUCCESS);
    CUresult result = event_find(&call, handle, &event);
    if (!result)
        event_gone(event, DEAD);
    return emulator_end(&call, result);
}

/* A node records the event at each launch. */
static CUresult record_in_graph(struct call *call, struct event *event, struct stream *stream)
{
    struct work *work = work_new(call, RECORD);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    work->event = event;
    return capture_add(work, stream);
}

static CUresult record(struct call *call, struct event *event, struct stream *stream,
                       unsigned flags)
{
    if (event->context != stream->context) {
        complain("%s: wrong context: the event is of device %d, the stream of device %d",
                 call->name, event->context->device, stream->context->device);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    bool taken = false;
    CUresult result = capture_enter(stream, &taken);
    if (result)
        return result;
    if (taken && flags & RECORD_EXTERNAL)
        return record_in_graph(call, event, stream);
    record_release(event->record);
    event->record = NULL;
    event->captured = 0;
    if (taken)
        return capture_record(event, stream);
    struct record *mark = calloc(1, sizeof *mark);
    struct work *work = work_new(call, RECORD);
    if (!mark || !work) {
        free(mark);
        free(work);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    mark->users = 2;
    event->record = work->record = mark;
    mark_record(event, mark);
    return work_queue(work, stream);
}

static CUresult find_and_record(struct call *call, CUevent handle, CUstream stream_handle,
                                unsigned flags)
{
    struct event *event = NULL;
    struct stream *stream = NULL;
    BEGIN(*call, STARTED);
    CUresult result = event_find(call, handle, &event);
    if (!result)
        result = stream_resolve(call, stream_handle, &stream);
    return emulator_end(call, result ? result : record(call, event, stream, flags));
}

API cuEventRecord(CUevent handle, CUstream stream)
{
    struct call call = CALL("cuEventRecord", .stream = NUMBER(stream));
    return find_and_record(&call, handle, stream, 0);
}

API cuEventRecordWithFlags(CUevent handle, CUstream stream, unsigned flags)
{
    struct call call = CALL("cuEventRecordWithFlags", .stream = NUMBER(stream));
    return find_and_record(&call, handle, stream, flags);
}

API cuEventQuery(CUevent handle)
{
    struct call call = CALL("cuEventQuery");
    struct event *event = NULL;
    BEGIN(call, STARTED);
    CUresult result = event_find(&call, handle, &event);
    if (!result)
        result = capture_forbids_asking(event);
    if (!result)
        result = capture_forbids(thread_now());
    if (!result && ((event->record && !event->record->done) || mark_is_awaited(event)))
        result = CUDA_ERROR_NOT_READY;
    return emulator_end(&call, result);
}

API cuEventSynchronize(CUevent handle)
{
    struct call call = CALL("cuEventSynchronize");
    struct event *event = NULL;
    BEGIN(call, STARTED);
    CUresult result = event_find(&call, handle, &event);
    if (!result)
        result = capture_forbids_asking(event);
    if (!result)
        result = capture_forbids(thread_now());
    if (!result && event->record)
        result = wait_record(&call, event->record);
    if (!result)
        result = mark_wait(&call, event);
    if (!result)
        pools_trim_idle(event->context->device);
    return emulator_end(&call, result);
}

API cuEventElapsedTime(float *out, CUevent start_handle, CUevent end_handle)
{
    struct call call = CALL("cuEventElapsedTime");
    struct event *start = NULL, *end = NULL;
    BEGIN(call, STARTED);
    CUresult result = event_find(&call, start_handle, &start);
    if (!result)
        result = event_find(&call, end_handle, &end);
    if (!result)
        result = capture_forbids_asking(start);
    if (!result)
        result = capture_forbids_asking(end);
    if (!result && (!out || start->context != end->context || !start->record || !end->record ||
                    ((start->flags | end->flags) & DISABLE_TIMING)))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (!result && !(start->record->done && end->record->done))
        result = CUDA_ERROR_NOT_READY;
    if (!result)
        *out = (float)((end->record->time - start->record->time) * 1e3);
    return emulator_end(&call, result);
}
