/* What other processes of this machine are given: memory, mapped memory, and events.
 *
 * Shared memory lies in files without names, which others open through /proc. A handle says in whose
 * file it is, and where. What its process frees, others read as zero from then on. */
#include "emulator.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, ALIGNMENT = 2 << 20, INTERPROCESS = 4, LAZY_PEERS = 1, DESCRIPTOR = 1 };
enum { MAX_PROCESSES = 64, MAX_FILES = 256 };
static const uint64_t OF_MEMORY = UINT64_C(0x656d756c6174656d), OF_EVENT = UINT64_C(0x656d756c61746576);

struct handle {
    uint64_t magic;
    int process, file;
    uint64_t place, skipped, bytes, id; /* `skipped`: bytes of the first page */
    unsigned char unused[16];
};

/* How often an event was recorded, and how many of these marks the streams have reached. */
struct mark {
    uint32_t recorded, reached;
};

static struct {
    int process, file;
    struct mark *marks;
} processes[MAX_PROCESSES]; /* the first is this one */

static int open_elsewhere(const struct handle *handle)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->process, handle->file);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* -- memory --------------------------------------------------------------------------------------- */

static uint64_t first_page(const struct region *region)
{
    return region->address / PAGE * PAGE;
}

static size_t bytes_of_pages(const struct region *region)
{
    return align_up(region->address + region->bytes, PAGE) - first_page(region);
}

/* Moves the pages of an allocation into the device's file, at the same addresses. Doing so twice
 * with a page changes nothing: neighbours may have it, too. */
static bool publish(struct region *region)
{
    static const char zeros[PAGE];
    struct device *device = &machine.devices[region->device];
    if (region->shared)
        return true;
    if (!device->file) {
        int made = memfd_create("emulated memory that is shared", MFD_CLOEXEC);
        if (made < 0 || ftruncate(made, (off_t)device->range.bytes))
            return false;
        device->file = made;
    }
    uint64_t first = first_page(region);
    off_t place = (off_t)(first - device->range.base);
    for (size_t done = 0; done < bytes_of_pages(region); done += PAGE)
        if (memcmp(memory_at(first + done), zeros, PAGE) &&
            pwrite(device->file, memory_at(first + done), PAGE, place + (off_t)done) != PAGE)
            return false;
    if (mmap(memory_at(first), bytes_of_pages(region), PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED | MAP_NORESERVE, device->file, place) == MAP_FAILED)
        return false;
    return region->shared = true;
}

/* Only plain memory can be shared the old way. */
API cuIpcGetMemHandle(struct handle *out, CUdeviceptr address)
{
    struct call call = CALL("cuIpcGetMemHandle", .address = address);
    BEGIN(call, CONTEXT);
    struct region *region = regions_find(&machine.regions, address);
    if (!out || !region || region->kind != DEVICE)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    if (!publish(region))
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    const struct device *device = &machine.devices[region->device];
    *out = (struct handle){.magic = OF_MEMORY, .process = getpid(), .file = device->file,
                           .place = first_page(region) - device->range.base,
                           .skipped = region->address % PAGE, .bytes = region->bytes,
                           .id = region->id};
    return emulator_end(&call, CUDA_SUCCESS);
}

static struct region *opened_before(const struct handle *handle, const struct context *context)
{
    for (size_t i = 0; i < machine.regions.count; i++) {
        struct region *region = machine.regions.items[i];
        if (region->kind == IMPORTED && region->context == context &&
            region->owner == handle->process && region->id_there == handle->id)
            return region;
    }
    return NULL;
}

static CUresult import(struct call *call, const struct handle *handle, struct region **out)
{
    size_t bytes = align_up(handle->skipped + handle->bytes, PAGE);
    int file = open_elsewhere(handle);
    if (file < 0)
        return CUDA_ERROR_INVALID_HANDLE; /* its process has ended */
    struct region *region = region_new(&machine.devices[call->context->device].range, bytes,
                                       ALIGNMENT, IMPORTED);
    void *place = region ? mmap(memory_at(region->address), bytes, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, (off_t)handle->place)
                         : MAP_FAILED;
    close(file);
    if (place == MAP_FAILED) {
        if (region)
            region_free(region, DEAD);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    region->device = call->context->device;
    region->context = call->context;
    region->owner = handle->process;
    region->id_there = handle->id;
    region->skipped = handle->skipped;
    *out = region;
    return CUDA_SUCCESS;
}

API cuIpcOpenMemHandle_v2(CUdeviceptr *out, struct handle handle, unsigned flags)
{
    struct call call = CALL("cuIpcOpenMemHandle", .bytes = handle.bytes);
    BEGIN(call, CONTEXT | UNSAFE);
    if (!out || flags != LAZY_PEERS)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    if (handle.magic != OF_MEMORY)
        return emulator_end(&call, CUDA_ERROR_INVALID_HANDLE);
    if (handle.process == getpid()) {
        complain("cuIpcOpenMemHandle: the handle is of this process, and is for others");
        return emulator_end(&call, CUDA_ERROR_INVALID_CONTEXT);
    }
    struct region *region = opened_before(&handle, call.context);
    CUresult result = region ? CUDA_SUCCESS : import(&call, &handle, &region);
    if (result)
        return emulator_end(&call, result);
    region->opened++;
    *out = call.address = region->address + region->skipped;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuIpcOpenMemHandle(CUdeviceptr *out, struct handle handle, unsigned flags)
{
    return cuIpcOpenMemHandle_v2(out, handle, flags);
}

API cuIpcCloseMemHandle(CUdeviceptr address)
{
    struct call call = CALL("cuIpcCloseMemHandle", .address = address);
    BEGIN(call, FREEING | CONTEXT | UNSAFE);
    struct region *region = regions_find(&machine.regions, address);
    if (!region || region->kind != IMPORTED || region->address + region->skipped != address)
        return emulator_end(&call, unknown_address(&call, address));
    if (--region->opened)
        return emulator_end(&call, CUDA_SUCCESS);
    if (work_uses(region->address, region->bytes))
        complain("cuIpcCloseMemHandle: 0x%llx is used by work that is pending",
                 (unsigned long long)address);
    region_free(region, DEAD);
    return emulator_end(&call, CUDA_SUCCESS);
}

/* -- mapped memory -------------------------------------------------------------------------------- */

API cuMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags)
{
    struct call call = CALL("cuMemExportToShareableHandle", .address = handle);
    struct physical *physical = NULL;
    BEGIN(call, STARTED);
    if (!out || flags)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    CUresult result = physical_find(&call, handle, &physical);
    if (!physical)
        return emulator_end(&call, result ? result : CUDA_ERROR_INVALID_VALUE);
    if (type != DESCRIPTOR)
        return emulator_end(&call, CUDA_ERROR_NOT_SUPPORTED);
    int descriptor = physical_export(physical);
    if (descriptor == -1)
        complain("cuMemExportToShareableHandle: 0x%llx was made for this process alone",
                 (unsigned long long)handle);
    if (descriptor < 0)
        return emulator_end(&call, descriptor == -1 ? CUDA_ERROR_INVALID_VALUE
                                                    : CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)out = descriptor;
    return emulator_end(&call, CUDA_SUCCESS);
}

/* A file is kept open for each process that memory comes from. */
static int file_of(int descriptor)
{
    static struct {
        dev_t device;
        ino_t number;
        int file;
    } files[MAX_FILES];
    struct stat it;
    if (fstat(descriptor, &it))
        return -1;
    for (size_t i = 0; i < MAX_FILES; i++) {
        if (!files[i].file) {
            char path[32];
            snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
            files[i].file = open(path, O_RDWR | O_CLOEXEC);
            files[i].device = it.st_dev;
            files[i].number = it.st_ino;
        }
        if (files[i].device == it.st_dev && files[i].number == it.st_ino)
            return files[i].file;
    }
    return -1;
}

API cuMemImportFromShareableHandle(uint64_t *out, void *handle, int type)
{
    struct call call = CALL("cuMemImportFromShareableHandle");
    BEGIN(call, STARTED);
    if (!out)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    if (type != DESCRIPTOR)
        return emulator_end(&call, CUDA_ERROR_NOT_SUPPORTED);
    int descriptor = (int)(intptr_t)handle;
    struct physical *physical = physical_import(descriptor, file_of(descriptor));
    if (!physical)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    call.bytes = physical->bytes;
    *out = call.address = NUMBER(physical);
    return emulator_end(&call, CUDA_SUCCESS);
}

/* -- events --------------------------------------------------------------------------------------- */

static struct mark *map_marks(int file)
{
    void *place = mmap(NULL, machine.events.limit * sizeof(struct mark), PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_NORESERVE, file, 0);
    return place == MAP_FAILED ? NULL : place;
}

static struct mark *own_marks(void)
{
    if (processes[0].process == getpid())
        return processes[0].marks;
    int file = memfd_create("emulated events that are shared", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)(machine.events.limit * sizeof(struct mark))))
        return NULL;
    processes[0].file = file;
    processes[0].marks = map_marks(file);
    processes[0].process = getpid();
    return processes[0].marks;
}

static struct mark *marks_elsewhere(const struct handle *handle)
{
    for (size_t i = 1; i < MAX_PROCESSES; i++) {
        if (!processes[i].process) {
            int file = open_elsewhere(handle);
            struct mark *marks = file < 0 ? NULL : map_marks(file);
            if (file >= 0)
                close(file);
            if (!marks)
                return NULL;
            processes[i].process = handle->process;
            processes[i].marks = marks;
        }
        if (processes[i].process == handle->process)
            return processes[i].marks;
    }
    return NULL;
}

API cuIpcGetEventHandle(struct handle *out, CUevent event_handle)
{
    struct call call = CALL("cuIpcGetEventHandle");
    struct event *event = NULL;
    BEGIN(call, STARTED);
    CUresult result = event_find(&call, event_handle, &event);
    if (result)
        return emulator_end(&call, result);
    if (!out || !(event->flags & INTERPROCESS) || event->is_foreign)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    struct mark *marks = own_marks();
    if (!marks)
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    size_t place = (size_t)((char *)event - machine.events.base) / machine.events.size;
    if (!event->mark) {
        bool pending = event->record && !event->record->done;
        event->mark = &marks[place];
        *event->mark = (struct mark){.recorded = pending};
        if (pending) {
            event->record->mark = event->mark;
            event->record->number = 1;
        }
    }
    *out = (struct handle){.magic = OF_EVENT, .process = getpid(), .file = processes[0].file,
                           .place = place};
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuIpcOpenEventHandle(CUevent *out, struct handle handle)
{
    struct call call = CALL("cuIpcOpenEventHandle");
    BEGIN(call, CONTEXT);
    if (!out || handle.magic != OF_EVENT || handle.place >= machine.events.limit)
        return emulator_end(&call, out ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE);
    if (handle.process == getpid()) {
        complain("cuIpcOpenEventHandle: the handle is of this process, and is for others");
        return emulator_end(&call, CUDA_ERROR_INVALID_CONTEXT);
    }
    struct mark *marks = marks_elsewhere(&handle);
    struct event *event = marks ? slab_take(&machine.events) : NULL;
    if (!event)
        return emulator_end(&call, marks ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_HANDLE);
    enum { DISABLE_TIMING = 2 };
    event->context = call.context;
    event->flags = INTERPROCESS | DISABLE_TIMING;
    event->mark = &marks[handle.place];
    event->is_foreign = true;
    *out = event;
    return emulator_end(&call, CUDA_SUCCESS);
}

void mark_record(struct event *event, struct record *record)
{
    record->mark = event->mark;
    if (event->mark)
        record->number = __atomic_add_fetch(&event->mark->recorded, 1, __ATOMIC_SEQ_CST);
}

void mark_reach(const struct record *record)
{
    if (record->mark && __atomic_load_n(&record->mark->reached, __ATOMIC_SEQ_CST) < record->number)
        __atomic_store_n(&record->mark->reached, record->number, __ATOMIC_SEQ_CST);
}

/* Has another process recorded it, and has its stream not come to that yet? */
bool mark_is_awaited(const struct event *event)
{
    if (!event->mark || (event->record && !event->record->done))
        return false;
    return __atomic_load_n(&event->mark->reached, __ATOMIC_SEQ_CST) <
           __atomic_load_n(&event->mark->recorded, __ATOMIC_SEQ_CST);
}

/* No thread of this process is woken when another one gets so far: the caller asks again, and
 * nothing is queued behind the event before. */
CUresult mark_wait(struct call *call, const struct event *event)
{
    uint64_t generation = machine.generation;
    for (double begin = now(); mark_is_awaited(event);) {
        if (now() - begin > machine.patience) {
            complain("%s: blocked on work that another process holds", call->name);
            return CUDA_ERROR_LAUNCH_TIMEOUT;
        }
        machine_unlock();
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
        machine_lock();
        if (machine.generation != generation || event->state != ALIVE)
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    return CUDA_SUCCESS;
}
