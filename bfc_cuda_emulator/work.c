/* The queues of the streams: what is queued, what may run, and who waits for it.
 *
 * Each piece of work has a number in the order of queueing. It may run when it is the first of its
 * stream, the stream is not held, and the rules of the legacy stream and the awaited event allow.
 */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

void record_release(struct record *record)
{
    if (record && !--record->users)
        free(record);
}

struct work *work_new(struct call *call, enum action action)
{
    struct work *work = calloc(1, sizeof *work);
    if (work) {
        work->action = action;
        work->name = call->name;
    }
    return work;
}

static void work_free(struct work *work)
{
    record_release(work->record);
    belongings_release(work->belongings);
    if (work->finished) {
        work->finished->done = true;
        record_release(work->finished);
    }
    free(work->staged);
    free(work);
}

static void busy_add(struct stream *stream)
{
    stream->busy = true;
    stream->prev_busy = NULL;
    stream->next_busy = machine.busy;
    if (machine.busy)
        machine.busy->prev_busy = stream;
    machine.busy = stream;
}

static void busy_remove(struct stream *stream)
{
    stream->busy = false;
    if (stream->prev_busy)
        stream->prev_busy->next_busy = stream->next_busy;
    else
        machine.busy = stream->next_busy;
    if (stream->next_busy)
        stream->next_busy->prev_busy = stream->prev_busy;
}

static struct work *work_pop(struct stream *stream)
{
    struct work *work = stream->head;
    stream->head = work->next;
    if (!stream->head) {
        stream->tail = NULL;
        busy_remove(stream);
        if (stream->state == CLOSED)
            stream_close(stream, DEAD);
    }
    return work;
}

/* Has the stream work queued up to that number? The legacy stream counts that of every blocking
 * stream as its own, since it would have to wait for it. */
bool work_pending(const struct stream *stream, uint64_t order)
{
    if (stream->head && stream->head->order <= order)
        return true;
    const struct context *context = stream->context;
    if (stream != context->legacy)
        return false;
    for (const struct stream *other = machine.busy; other; other = other->next_busy)
        if (other->context == context && stream_blocking(other) && other->head->order <= order)
            return true;
    return false;
}

static bool may_run(const struct stream *stream)
{
    const struct work *work = stream->head;
    const struct context *context = stream->context;
    const struct stream *legacy = context->legacy;
    if (stream->held || work->running)
        return false;
    if (work->action == WAIT && !work->record->done)
        return false;
    if (!stream_blocking(stream))
        return true;
    if (stream != legacy)
        return !legacy || !legacy->head || legacy->head->order > work->order;
    for (const struct stream *other = machine.busy; other; other = other->next_busy)
        if (other != stream && other->context == context && stream_blocking(other) &&
            other->head->order < work->order)
            return false;
    return true;
}

/* Host functions run on a thread of the driver, and without the lock: they may take others. */
static void *host_worker(void *unused)
{
    (void)unused;
    machine_lock();
    for (;;) {
        struct stream *stream = machine.busy;
        while (stream && !(stream->head->action == CALL_HOST && stream->head->running))
            stream = stream->next_busy;
        if (!stream) {
            pthread_cond_wait(&machine.changed, &machine.lock);
            continue;
        }
        struct work *work = stream->head;
        machine_unlock();
        if (work->callback)
            work->callback(work->handle, CUDA_SUCCESS, work->argument);
        else
            work->function(work->argument);
        machine_lock();
        if (!work->cancelled && stream->head == work)
            work_pop(stream);
        work_free(work);
        work_pump();
        pthread_cond_broadcast(&machine.changed);
    }
    return NULL;
}

static void call_host(struct work *work)
{
    pthread_t thread;
    work->running = true;
    if (!machine.host_worker && !pthread_create(&thread, NULL, host_worker, NULL)) {
        pthread_detach(thread);
        machine.host_worker = true;
    }
    pthread_cond_broadcast(&machine.changed);
}

static void run(struct work *work)
{
    switch (work->action) {
    case COPY:
    case FILL:
        copy_run(work);
        break;
    case RECORD:
        work->record->done = true;
        work->record->time = now();
        mark_reach(work->record);
        break;
    case ALLOC:
        pool_commit(work);
        break;
    case FREE:
        pool_finish(work);
        break;
    default:
        break;
    }
}

/* Runs all that may run. */
void work_pump(void)
{
    bool progress = true, any = false;
    while (progress) {
        progress = false;
        for (struct stream *stream = machine.busy, *next; stream; stream = next) {
            next = stream->next_busy;
            while (stream->busy && may_run(stream)) {
                progress = any = true;
                if (stream->head->action == CALL_HOST) {
                    call_host(stream->head);
                    break;
                }
                struct work *work = work_pop(stream);
                if (!work->cancelled)
                    run(work);
                work_free(work);
            }
        }
    }
    if (any)
        pthread_cond_broadcast(&machine.changed);
}

CUresult work_queue(struct work *work, struct stream *stream)
{
    work->stream = stream;
    work->order = ++machine.order;
    if (stream->tail)
        stream->tail->next = work;
    else
        stream->head = work;
    stream->tail = work;
    if (!stream->busy)
        busy_add(stream);
    work_pump();
    return CUDA_SUCCESS;
}

/* Everything queued on the stream is lost, as when its context is destroyed. */
void work_drop(struct stream *stream)
{
    while (stream->head) {
        struct work *work = work_pop(stream);
        if (work->record && work->action == RECORD) {
            work->record->done = true;
            mark_reach(work->record);
        }
        if (work->running)
            work->cancelled = true; /* the thread that runs it frees it */
        else
            work_free(work);
    }
}

static bool record_done(const void *record)
{
    return ((const struct record *)record)->done;
}

CUresult wait_record(struct call *call, struct record *record)
{
    record->users++;
    CUresult result = wait_until(call, record_done, record);
    record_release(record);
    return result;
}

/* Queues the work and waits for it. A caller that gives up takes the work back: its memory may be
 * gone once the caller has returned. */
CUresult work_block(struct call *call, struct work *work, struct stream *stream)
{
    struct record *finished = calloc(1, sizeof *finished);
    if (!finished)
        return CUDA_ERROR_OUT_OF_MEMORY;
    finished->users = 2;
    work->finished = finished;
    work_queue(work, stream);
    CUresult result = wait_until(call, record_done, finished);
    if (result && !finished->done)
        work->cancelled = true;
    record_release(finished);
    return result;
}

struct wait {
    struct stream *stream;
    struct context *context;
    int device;
    uint64_t order;
};

static bool nothing_pending(const void *argument)
{
    const struct wait *wait = argument;
    if (wait->stream)
        return wait->stream->state != ALIVE || !work_pending(wait->stream, wait->order);
    for (const struct stream *stream = machine.busy; stream; stream = stream->next_busy)
        if ((wait->context ? stream->context == wait->context
                           : stream->context->device == wait->device) &&
            stream->head->order <= wait->order)
            return false;
    return true;
}

CUresult wait_stream(struct call *call, struct stream *stream)
{
    struct wait wait = {.stream = stream, .order = machine.order};
    CUresult result = wait_until(call, nothing_pending, &wait);
    if (!result)
        pools_trim_idle(stream->context->device);
    return result;
}

CUresult wait_context(struct call *call, struct context *context)
{
    struct wait wait = {.context = context, .order = machine.order};
    CUresult result = wait_until(call, nothing_pending, &wait);
    if (!result)
        pools_trim_idle(context->device);
    return result;
}

CUresult wait_device(struct call *call, int device)
{
    struct wait wait = {.device = device, .order = machine.order};
    return wait_until(call, nothing_pending, &wait);
}

static bool overlaps(uint64_t one, size_t bytes, uint64_t other, size_t length)
{
    return one < other + length && other < one + bytes;
}

/* Does work that is still queued read or write there? */
bool work_uses(uint64_t address, size_t bytes)
{
    for (const struct stream *stream = machine.busy; stream; stream = stream->next_busy)
        for (const struct work *work = stream->head; work; work = work->next) {
            if (work->cancelled || (work->action != COPY && work->action != FILL))
                continue;
            if (overlaps(work->to, copy_reach_to(work), address, bytes))
                return true;
            if (work->action == COPY && !work->staged &&
                overlaps(work->from, copy_reach_from(work), address, bytes))
                return true;
        }
    return false;
}
