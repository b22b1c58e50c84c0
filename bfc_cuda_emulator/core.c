/* The machine, its lock, the call log, injected faults and complaints. */
#include "emulator.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct machine machine = {.lock = PTHREAD_MUTEX_INITIALIZER, .patience = 10.0,
                         .newest_known = INT_MAX};
_Thread_local struct thread this_thread;

/* A child shares nothing with a driver that was in use: every call of it fails, as with a real one. */
static void after_fork_in_child(void)
{
    machine.forked = machine.initialised;
    machine_unlock();
}

static void start(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&machine.changed, &attributes);
    pthread_atfork(machine_lock, machine_unlock, after_fork_in_child);
    slab_open(&machine.streams, sizeof(struct stream), 1 << 16);
    slab_open(&machine.events, sizeof(struct event), 1 << 20);
    slab_open(&machine.pools, sizeof(struct pool), 1 << 12);
    slab_open(&machine.contexts, sizeof(struct context), 1 << 10);
    slab_open(&machine.physicals, sizeof(struct physical), 1 << 18);
    slab_open(&machine.graphs, sizeof(struct graph), 1 << 16);
    slab_open(&machine.nodes, sizeof(struct node), 1 << 20);
    slab_open(&machine.execs, sizeof(struct exec), 1 << 16);
    slab_open(&machine.objects, sizeof(struct object), 1 << 16);
    const char *leaks = getenv("BFC_EMULATOR_LEAKS");
    if (leaks && *leaks && strcmp(leaks, "0"))
        on_exit(report_leaks, NULL);
}

void machine_start(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
}

void machine_lock(void)
{
    pthread_mutex_lock(&machine.lock);
}

void machine_unlock(void)
{
    pthread_mutex_unlock(&machine.lock);
}

struct thread *thread_now(void)
{
    struct thread *thread = &this_thread;
    if (!thread->id)
        thread->id = (uint64_t)gettid();
    if (thread->generation != machine.generation) {
        thread->generation = machine.generation;
        thread->depth = 0;
        thread->capture_mode = 0;
    }
    return thread;
}

static CUresult injected(const struct call *call)
{
    for (size_t i = 0; i < machine.fault_count; i++) {
        struct fault *fault = &machine.faults[i];
        if (strcmp(fault->name, call->name) || !fault->left)
            continue;
        if (fault->above != NO_NUMBER && (call->bytes == NO_NUMBER || call->bytes <= fault->above))
            continue;
        if (fault->skip > 0) {
            fault->skip--;
            continue;
        }
        if (fault->left > 0)
            fault->left--;
        return fault->error;
    }
    return CUDA_SUCCESS;
}

CUresult emulator_begin(struct call *call, int needs)
{
    CUresult result;
    if (machine.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    machine_start();
    machine_lock();
    call->locked = true;
    if ((result = injected(call)))
        return result;
    if ((needs & STARTED) && !machine.initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if ((needs & FREEING) && was_stale(call->address)) {
        call->over = true;
        return CUDA_SUCCESS;
    }
    if ((needs & CONTEXT) == CONTEXT) {
        call->context = context_current(&result);
        if (!call->context)
            return result;
    }
    if (needs & UNSAFE)
        return capture_forbids(thread_now());
    return CUDA_SUCCESS;
}

static void log_call(const struct call *call, CUresult result)
{
    if (machine.logged == machine.log_room) {
        size_t room = machine.log_room ? machine.log_room * 2 : 4096;
        struct logged *log = realloc(machine.log, room * sizeof *log);
        if (!log)
            return;
        machine.log = log;
        machine.log_room = room;
    }
    machine.log[machine.logged++] = (struct logged){call->name, thread_now()->id, call->bytes,
                                                    call->address, call->stream, result};
}

CUresult emulator_end(struct call *call, CUresult result)
{
    if (!call->locked)
        return result;
    log_call(call, result);
    bool dying = machine.dying != NULL;
    machine_unlock();
    if (dying)
        objects_destroy();
    return result;
}

void complain(const char *format, ...)
{
    char *text = NULL;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    if (length < 0)
        return;
    char **list = realloc(machine.complaints, (machine.complained + 1) * sizeof *list);
    if (!list) {
        free(text);
        return;
    }
    machine.complaints = list;
    machine.complaints[machine.complained++] = text;
}

void slab_open(struct slab *slab, size_t size, size_t limit)
{
    size = align_up(size, 64);
    void *base = mmap(NULL, size * limit, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *slab = (struct slab){.base = base == MAP_FAILED ? NULL : base, .size = size, .limit = limit};
}

/* The first member of every object is its state. */
void *slab_take(struct slab *slab)
{
    for (size_t tries = 0; slab->base && tries < slab->limit; tries++) {
        char *place = slab->base + slab->cursor * slab->size;
        slab->cursor = (slab->cursor + 1) % slab->limit;
        if (*(enum state *)place == ALIVE || *(enum state *)place == CLOSED)
            continue;
        if (slab->high < slab->limit && slab->cursor > slab->high)
            slab->high = slab->cursor;
        else if (!slab->cursor)
            slab->high = slab->limit;
        memset(place, 0, slab->size);
        *(enum state *)place = ALIVE;
        return place;
    }
    return NULL;
}

void *slab_find(struct slab *slab, const void *handle)
{
    const char *place = handle;
    if (!slab->base || place < slab->base || place >= slab->base + slab->high * slab->size)
        return NULL;
    if ((size_t)(place - slab->base) % slab->size || *(const enum state *)place == UNUSED)
        return NULL;
    return (void *)place;
}

/* How many threads are blocked in a call now; no part of the machine, which a reset empties under them. */
size_t blocked_callers;

/* Waits without the lock until ready() says yes. The work that it waits for may be held by the
 * very thread that waits, so patience has an end. */
CUresult wait_until(struct call *call, bool (*ready)(const void *), const void *argument)
{
    struct timespec deadline;
    uint64_t generation = machine.generation;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += (time_t)machine.patience;
    deadline.tv_nsec += (long)((machine.patience - (double)(time_t)machine.patience) * 1e9);
    if (deadline.tv_nsec >= 1000000000L) {
        deadline.tv_nsec -= 1000000000L;
        deadline.tv_sec++;
    }
    while (!ready(argument)) {
        blocked_callers++;
        int late = pthread_cond_timedwait(&machine.changed, &machine.lock, &deadline);
        blocked_callers--;
        if (machine.generation != generation)
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        if (late == ETIMEDOUT && !ready(argument)) {
            complain("%s: blocked on held work", call->name);
            return CUDA_ERROR_LAUNCH_TIMEOUT;
        }
    }
    return CUDA_SUCCESS;
}
