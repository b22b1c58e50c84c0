/* What tests steer the machine with. Python calls these through ctypes. */
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* All that a test has left goes, but the handles of what libraries keep stay good. */
static void forget_everything(void)
{
    captures_reset();
    graphs_reset();
    for (int i = 0; i < MAX_DEVICES; i++) {
        struct context *context = &machine.primaries[i];
        context->adoptable |= context->state == ALIVE || context->retained;
        context->device = i;
        context->primary = true;
        context->flags = 0;
        if (context->state == ALIVE)
            context_destroy(context, STALE);
        context->state = UNUSED;
        context->retained = 0;
    }
    for (size_t i = 0; i < machine.contexts.high; i++) {
        struct context *context =
            (struct context *)(machine.contexts.base + i * machine.contexts.size);
        if (context->state == ALIVE) {
            context_destroy(context, STALE);
            context->state = STALE;
        }
    }
    virtual_reset();
    memory_reset();
    pools_reset();
    machine.generation++;
}

static void clear(void)
{
    for (size_t i = 0; i < machine.complained; i++)
        free(machine.complaints[i]);
    machine.complained = machine.logged = machine.fault_count = 0;
    for (size_t i = 0; i < machine.streams.high; i++)
        ((struct stream *)(machine.streams.base + i * machine.streams.size))->held = false;
    work_pump();
    pthread_cond_broadcast(&machine.changed);
}

EXPORT void emu_reset(int devices, const uint64_t *totals, int driver_version, uint64_t host_total)
{
    machine_start();
    machine_lock();
    forget_everything();
    clear();
    machine.device_count = devices < MAX_DEVICES ? devices : MAX_DEVICES;
    machine.initialised = machine.wanted && machine.device_count;
    machine.driver_version = driver_version;
    machine.host_total = host_total;
    machine.no_peers = machine.rising = false;
    machine.patience = 10.0;
    for (int i = 0; i < machine.device_count; i++)
        device_reset(i, totals[i]);
    machine_unlock();
}

EXPORT void emu_clear(void)
{
    machine_lock();
    clear();
    machine_unlock();
}

EXPORT void emu_set_patience(double seconds)
{
    machine_lock();
    machine.patience = seconds;
    machine_unlock();
}

EXPORT void emu_set_peers(int possible)
{
    machine_lock();
    machine.no_peers = !possible;
    machine_unlock();
}

EXPORT void emu_set_reuse(int reuse)
{
    machine_lock();
    machine.rising = !reuse;
    machine_unlock();
}

EXPORT void emu_set_attribute(int device, int attribute, int value)
{
    machine_lock();
    if (device_known(device) && attribute > 0 && attribute < MAX_ATTRIBUTE)
        machine.devices[device].attributes[attribute] = value;
    machine_unlock();
}

EXPORT void emu_set_others(int device, uint64_t bytes)
{
    machine_lock();
    machine.devices[device].others = bytes;
    machine_unlock();
}

EXPORT void emu_set_free(int device, uint64_t bytes)
{
    machine_lock();
    struct device *it = &machine.devices[device];
    size_t most = it->total - it->used;
    it->others = bytes < most ? most - bytes : 0;
    machine_unlock();
}

EXPORT size_t emu_log_length(void)
{
    machine_lock();
    size_t length = machine.logged;
    machine_unlock();
    return length;
}

EXPORT size_t emu_log_copy(struct logged *out, size_t from, size_t room)
{
    machine_lock();
    size_t count = from < machine.logged ? machine.logged - from : 0;
    if (count > room)
        count = room;
    if (count)
        memcpy(out, machine.log + from, count * sizeof *out);
    machine_unlock();
    return count;
}

EXPORT size_t emu_complaints(char *out, size_t room)
{
    size_t length = 0;
    machine_lock();
    for (size_t i = 0; i < machine.complained; i++) {
        size_t bytes = strlen(machine.complaints[i]) + 1;
        if (length + bytes <= room)
            memcpy(out + length, machine.complaints[i], bytes);
        length += bytes;
    }
    machine_unlock();
    return length;
}

EXPORT int emu_fail(const char *name, int error, long at, long times, uint64_t above)
{
    machine_lock();
    size_t kept = 0;
    for (size_t i = 0; i < machine.fault_count; i++)
        if (machine.faults[i].left)
            machine.faults[kept++] = machine.faults[i];
    machine.fault_count = kept;
    bool room = kept < MAX_FAULTS && strlen(name) < MAX_NAME;
    if (room) {
        struct fault *fault = &machine.faults[machine.fault_count++];
        strcpy(fault->name, name);
        fault->error = error;
        fault->skip = at - 1;
        fault->left = times;
        fault->above = above;
    }
    machine_unlock();
    return room;
}

EXPORT int emu_hide(const char *name)
{
    machine_start();
    machine_lock();
    bool room = machine.hidden_count < MAX_HIDDEN && strlen(name) < MAX_NAME;
    if (room)
        strcpy(machine.hidden[machine.hidden_count++], name);
    machine_unlock();
    return room;
}

EXPORT void emu_hide_newer(int version)
{
    machine_lock();
    machine.newest_known = version;
    machine_unlock();
}

bool name_hidden(const char *name)
{
    for (size_t i = 0; i < machine.hidden_count; i++)
        if (!strcmp(machine.hidden[i], name))
            return true;
    return false;
}

static struct stream *any_stream(CUstream handle, int device)
{
    if (NUMBER(handle) > 2) {
        struct stream *stream = slab_find(&machine.streams, handle);
        return stream && (stream->state == ALIVE || stream->state == CLOSED) ? stream : NULL;
    }
    if (!device_known(device) || context_check(&machine.primaries[device]))
        return NULL;
    return stream_special(&machine.primaries[device], handle);
}

EXPORT int emu_hold(CUstream handle, int device, int held)
{
    machine_lock();
    struct stream *stream = any_stream(handle, device);
    if (stream)
        stream->held = held;
    work_pump();
    machine_unlock();
    return stream != NULL;
}

EXPORT void emu_hold_all(int held)
{
    machine_lock();
    for (int i = 0; held && i < machine.device_count; i++)
        if (machine.primaries[i].state == ALIVE)
            stream_special(&machine.primaries[i], LEGACY_STREAM);
    for (size_t i = 0; i < machine.streams.high; i++) {
        struct stream *stream = (struct stream *)(machine.streams.base + i * machine.streams.size);
        if (stream->state == ALIVE || stream->state == CLOSED)
            stream->held = held;
    }
    work_pump();
    machine_unlock();
}

struct living {
    uint64_t address, bytes;
    int kind, device;
};

static size_t list(const struct regions *set, struct living *out, size_t room)
{
    machine_lock();
    size_t count = set->count;
    for (size_t i = 0; i < count && i < room; i++) {
        const struct region *region = set->items[i];
        out[i] = (struct living){region->address, region->bytes, (int)region->kind, region->device};
    }
    machine_unlock();
    return count;
}

EXPORT size_t emu_live(struct living *out, size_t room)
{
    return list(&machine.regions, out, room);
}

EXPORT size_t emu_reservations(struct living *out, size_t room)
{
    return list(&machine.reservations, out, room);
}

static size_t count_handles(void)
{
    size_t count = 0;
    for (size_t i = 0; i < machine.physicals.high; i++) {
        const struct physical *physical =
            (const struct physical *)(machine.physicals.base + i * machine.physicals.size);
        count += physical->state == ALIVE && physical->handles;
    }
    return count;
}

EXPORT size_t emu_live_handles(void)
{
    machine_lock();
    size_t count = count_handles();
    machine_unlock();
    return count;
}

static size_t count_alive(const struct slab *slab)
{
    size_t count = 0;
    for (size_t i = 0; i < slab->high; i++)
        count += *(const enum state *)(slab->base + i * slab->size) == ALIVE;
    return count;
}

EXPORT size_t emu_live_events(void)
{
    machine_lock();
    size_t count = count_alive(&machine.events);
    machine_unlock();
    return count;
}

/* Counts only streams that a caller created, not the legacy stream and those of threads. */
static size_t count_streams(void)
{
    size_t count = 0;
    for (size_t i = 0; i < machine.streams.high; i++) {
        struct stream *stream = (struct stream *)(machine.streams.base + i * machine.streams.size);
        count += stream->state == ALIVE && !stream->owner && stream != stream->context->legacy;
    }
    return count;
}

EXPORT size_t emu_live_streams(void)
{
    machine_lock();
    size_t count = count_streams();
    machine_unlock();
    return count;
}

EXPORT size_t emu_pending(void)
{
    size_t count = 0;
    machine_lock();
    for (const struct stream *stream = machine.busy; stream; stream = stream->next_busy)
        for (const struct work *work = stream->head; work; work = work->next)
            count++;
    machine_unlock();
    return count;
}

EXPORT size_t emu_blocked(void)
{
    machine_lock();
    size_t count = blocked_callers;
    machine_unlock();
    return count;
}

EXPORT unsigned emu_retained(int device)
{
    machine_lock();
    unsigned count = device_known(device) ? machine.primaries[device].retained : 0;
    machine_unlock();
    return count;
}

EXPORT int emu_device_of(uint64_t address)
{
    for (int i = 0; i < MAX_DEVICES; i++)
        if (machine.devices[i].range.base &&
            address - machine.devices[i].range.base < machine.devices[i].range.bytes)
            return i;
    return -1;
}

/* At the end of a process that asked for it: one line for each thing that was left. A process that
 * would have ended well ends with status 99 then. */
void report_leaks(int status, void *unused)
{
    enum { LEAKED = 99 };
    static const char *const kinds[] = {"device", "managed", "host",    "registered",
                                        "pooled", "mapped",  "imported"};
    size_t leaks = 0;
    (void)unused;
    if (machine.forked)
        return;
    machine_lock();
    for (size_t i = 0; i < machine.regions.count; i++, leaks++) {
        const struct region *region = machine.regions.items[i];
        fprintf(stderr, "bfc emulator: leaked %zu bytes of %s memory at 0x%llx, device %d\n",
                region->bytes, kinds[region->kind], (unsigned long long)region->address,
                region->device);
    }
    for (size_t i = 0; i < machine.reservations.count; i++, leaks++)
        fprintf(stderr, "bfc emulator: leaked %zu bytes of addresses at 0x%llx\n",
                machine.reservations.items[i]->bytes,
                (unsigned long long)machine.reservations.items[i]->address);
    for (size_t i = count_handles(); i--; leaks++)
        fprintf(stderr, "bfc emulator: leaked a handle of memory\n");
    for (size_t i = count_alive(&machine.events); i--; leaks++)
        fprintf(stderr, "bfc emulator: leaked an event\n");
    for (size_t i = count_streams(); i--; leaks++)
        fprintf(stderr, "bfc emulator: leaked a stream\n");
    for (int i = 0; i < machine.device_count; i++)
        if (machine.primaries[i].retained && ++leaks)
            fprintf(stderr,
                    "bfc emulator: leaked the primary context of device %d, retained %u times\n", i,
                    machine.primaries[i].retained);
    machine_unlock();
    if (leaks && !status) {
        fflush(NULL);
        _exit(LEAKED);
    }
}
