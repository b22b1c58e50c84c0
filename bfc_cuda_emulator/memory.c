/* Address ranges, regions, and plain, managed and pinned memory.
 *
 * The addresses are those of real pages of this process, which cost nothing until they are written:
 * an allocation of 80 GiB is fine, and a copy really copies. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, SMALL = 1 << 20, BIG_ALIGNMENT = 2 << 20, MAX_FREED = 1 << 16 };
enum { SMALLEST_ALIGNMENT = 512 };
static const size_t SMALLEST_RANGE = (size_t)1 << 30;

size_t align_up(size_t bytes, size_t alignment)
{
    return (bytes + alignment - 1) / alignment * alignment;
}

void *memory_at(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

/* The hint makes addresses easy to read in a failure; anywhere else is as good. A sanitizer leaves
 * room for some places and sizes only. */
bool range_open(struct range *range, size_t bytes, uint64_t hint, bool accessible)
{
    int protection = accessible ? PROT_READ | PROT_WRITE : PROT_NONE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *base = mmap(memory_at(hint), bytes, protection, flags, -1, 0);
    while (base == MAP_FAILED && bytes > SMALLEST_RANGE) {
        base = mmap(NULL, bytes, protection, flags, -1, 0);
        if (base == MAP_FAILED)
            bytes /= 2;
    }
    if (base == MAP_FAILED)
        return false;
    madvise(base, bytes, MADV_NOHUGEPAGE);
    madvise(base, bytes, MADV_DONTDUMP);
    uint64_t first = align_up((uintptr_t)base, BIG_ALIGNMENT);
    *range = (struct range){.base = first, .next = first, .top = first};
    range->bytes = bytes - (first - (uintptr_t)base);
    return true;
}

/* The index of the first region that begins behind this address. */
static size_t behind(const struct regions *set, uint64_t address)
{
    size_t low = 0, high = set->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (set->items[middle]->address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct region *regions_find(const struct regions *set, uint64_t address)
{
    size_t next = behind(set, address);
    struct region *region = next ? set->items[next - 1] : NULL;
    return region && address - region->address < region->bytes ? region : NULL;
}

struct region *regions_after(const struct regions *set, uint64_t address)
{
    size_t next = behind(set, address);
    return next < set->count ? set->items[next] : NULL;
}

bool regions_clear(const struct regions *set, uint64_t address, size_t bytes)
{
    const struct region *next = regions_after(set, address);
    return !regions_find(set, address) && (!next || next->address >= address + bytes);
}

bool regions_insert(struct regions *set, struct region *region)
{
    if (set->count == set->room) {
        size_t room = set->room ? set->room * 2 : 256;
        struct region **items = realloc(set->items, room * sizeof *items);
        if (!items)
            return false;
        set->items = items;
        set->room = room;
    }
    size_t place = behind(set, region->address);
    memmove(set->items + place + 1, set->items + place, (set->count - place) * sizeof *set->items);
    set->items[place] = region;
    set->count++;
    return true;
}

void regions_remove(struct regions *set, struct region *region)
{
    size_t place = behind(set, region->address) - 1;
    set->count--;
    memmove(set->items + place, set->items + place + 1, (set->count - place) * sizeof *set->items);
}

/* What was freed is remembered, so that a second free can be told from a wild pointer. */
static void forget_freed(struct regions *freed, uint64_t address, size_t bytes)
{
    for (;;) {
        struct region *region = regions_find(freed, address);
        if (!region)
            region = regions_after(freed, address);
        if (!region || region->address >= address + bytes)
            return;
        regions_remove(freed, region);
        free(region);
    }
}

static void remember_freed(struct regions *freed, struct region *region, enum state state)
{
    forget_freed(freed, region->address, region->bytes);
    if (freed->count == MAX_FREED) {
        for (size_t i = 0; i < MAX_FREED / 2; i++)
            free(freed->items[i]);
        freed->count -= MAX_FREED / 2;
        memmove(freed->items, freed->items + MAX_FREED / 2, freed->count * sizeof *freed->items);
    }
    region->state = state;
    if (!regions_insert(freed, region))
        free(region);
}

static bool in_range(const struct range *range, uint64_t address)
{
    return range->base && address - range->base < range->bytes;
}

/* The range that an address was taken from; NULL for what is only registered. */
struct range *range_holding(uint64_t address)
{
    struct range *others[] = {&machine.managed, &machine.host, &machine.reserved};
    for (int i = 0; i < MAX_DEVICES; i++)
        if (in_range(&machine.devices[i].range, address))
            return &machine.devices[i].range;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (in_range(others[i], address))
            return others[i];
    return NULL;
}

/* Freed addresses are free again, unless addresses rise. */
static void range_release(uint64_t address)
{
    struct range *range = range_holding(address);
    if (range && !machine.rising && address < range->next)
        range->next = address;
}

/* What a machine before this one has used is used again only where half of all addresses were:
 * whoever still frees memory of that machine must not free memory of this one. */
static void range_reset(struct range *range)
{
    if (range->top - range->base > range->bytes / 2)
        range->top = range->base;
    range->next = range->top;
}

/* The first free place from `next` on; from the bottom only when the top is reached. */
static uint64_t find_place(struct range *range, size_t bytes, size_t alignment)
{
    const struct regions *set = range == &machine.reserved ? &machine.reservations
                                                           : &machine.regions;
    uint64_t end = range->base + range->bytes, address = align_up(range->next, alignment);
    for (int round = 0; round < 2; round++) {
        while (address <= end && bytes <= end - address) {
            const struct region *hit = regions_find(set, address);
            if (!hit)
                hit = regions_after(set, address);
            if (!hit || hit->address >= address + bytes)
                return address;
            address = align_up(hit->address + hit->bytes, alignment);
        }
        address = align_up(range->base, alignment);
    }
    return 0;
}

struct region *region_new(struct range *range, size_t bytes, size_t alignment, enum kind kind)
{
    uint64_t address = range->base ? find_place(range, bytes, alignment) : 0;
    struct region *region = address ? region_put(range, address, bytes, kind) : NULL;
    if (region && (machine.rising || address == align_up(range->next, SMALLEST_ALIGNMENT)))
        range->next = address + bytes;
    return region;
}

struct region *region_put(struct range *range, uint64_t address, size_t bytes, enum kind kind)
{
    struct region *region = calloc(1, sizeof *region);
    if (!region)
        return NULL;
    if (range->top < address + bytes)
        range->top = address + bytes;
    *region = (struct region){.state = ALIVE, .address = address, .bytes = bytes, .kind = kind,
                              .ready = true, .id = ++machine.next_id};
    bool reserved = range == &machine.reserved;
    forget_freed(reserved ? &machine.freed_reservations : &machine.freed, address, bytes);
    struct regions *set = reserved ? &machine.reservations : &machine.regions;
    if (!regions_insert(set, region)) {
        free(region);
        return NULL;
    }
    return region;
}

static size_t charged(const struct region *region)
{
    return align_up(region->bytes, 512);
}

static bool oversubscribes(int device)
{
    enum { CONCURRENT_MANAGED_ACCESS = 89 };
    return machine.devices[device].attributes[CONCURRENT_MANAGED_ACCESS] != 0;
}

/* Managed memory takes room of the device only where it cannot be moved out in page faults. */
static size_t *account(const struct region *region)
{
    switch (region->kind) {
    case DEVICE:
        return &machine.devices[region->device].used;
    case MANAGED:
        if (!oversubscribes(region->device))
            return &machine.devices[region->device].used;
        return &machine.host_used;
    case HOST:
        return &machine.host_used;
    default:
        return NULL;
    }
}

static void drop_pages(const struct region *region, uint64_t first, size_t bytes)
{
    madvise(memory_at(first), bytes, region->shared ? MADV_REMOVE : MADV_DONTNEED);
    if (region->shared || region->kind == IMPORTED)
        mmap(memory_at(first), bytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

/* Takes a region away. The pages go back to the system, so what is read there later is zero. */
void region_free(struct region *region, enum state state)
{
    size_t *used = account(region);
    if (used)
        *used -= charged(region);
    if (region->kind == POOLED && region->pool)
        pool_uncharge(region);
    regions_remove(&machine.regions, region);
    range_release(region->address);
    if (region->kind != REGISTERED && region->kind != MAPPED) {
        uint64_t first = align_up(region->address, PAGE);
        uint64_t end = (region->address + region->bytes) / PAGE * PAGE;
        if (end > first)
            drop_pages(region, first, end - first);
    }
    remember_freed(&machine.freed, region, state);
}

void reservation_free(struct region *region, enum state state)
{
    regions_remove(&machine.reservations, region);
    range_release(region->address);
    remember_freed(&machine.freed_reservations, region, state);
}

/* Did an allocation of a machine before this one begin there? */
bool was_stale(uint64_t address)
{
    const struct region *freed = regions_find(&machine.freed, address);
    return freed && freed->address == address && freed->state == STALE &&
           !regions_find(&machine.regions, address);
}

void memory_reset(void)
{
    for (size_t i = machine.regions.count; i--;)
        if (machine.regions.items[i]->kind != MAPPED)
            region_free(machine.regions.items[i], STALE);
    machine.host_used = 0;
    for (int i = 0; i < MAX_DEVICES; i++)
        range_reset(&machine.devices[i].range);
    range_reset(&machine.managed);
    range_reset(&machine.host);
    range_reset(&machine.reserved);
    if (machine.managed.base)
        return;
    size_t terabyte = (size_t)1 << 40;
    range_open(&machine.managed, terabyte, UINT64_C(0x50) << 40, true);
    range_open(&machine.host, terabyte, UINT64_C(0x51) << 40, true);
    range_open(&machine.reserved, 4 * terabyte, UINT64_C(0x40) << 40, false);
}

static CUresult allocate(struct call *call, enum kind kind, size_t bytes, uint64_t *out)
{
    struct region probe = {.kind = kind, .device = call->context->device, .bytes = bytes};
    size_t *used = account(&probe);
    size_t left = used == &machine.host_used ? machine.host_total - machine.host_used
                                             : device_free(probe.device);
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (left < bytes && used != &machine.host_used)
        left += pools_give_back(probe.device, bytes - left);
    if (bytes > left || charged(&probe) > left)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct range *range = kind == DEVICE    ? &machine.devices[probe.device].range
                          : kind == MANAGED ? &machine.managed
                                            : &machine.host;
    size_t alignment = bytes < SMALL ? SMALLEST_ALIGNMENT : BIG_ALIGNMENT;
    struct region *region = region_new(range, bytes, alignment, kind);
    if (!region)
        return CUDA_ERROR_OUT_OF_MEMORY;
    region->device = probe.device;
    region->context = call->context;
    *used += charged(region);
    *out = call->address = region->address;
    return CUDA_SUCCESS;
}

API cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    struct call call = CALL("cuMemGetInfo");
    BEGIN(call, CONTEXT);
    if (free_bytes)
        *free_bytes = device_free(call.context->device);
    if (total)
        *total = machine.devices[call.context->device].total;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    struct call call = CALL("cuMemAlloc", .bytes = bytes);
    BEGIN(call, CONTEXT | UNSAFE);
    return emulator_end(&call, allocate(&call, DEVICE, bytes, out));
}

API cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned size)
{
    struct call call = CALL("cuMemAllocPitch", .bytes = align_up(width, 512) * height);
    (void)size;
    BEGIN(call, CONTEXT | UNSAFE);
    if (pitch)
        *pitch = align_up(width, 512);
    return emulator_end(&call, allocate(&call, DEVICE, call.bytes, out));
}

API cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    struct call call = CALL("cuMemAllocManaged", .bytes = bytes);
    BEGIN(call, CONTEXT | UNSAFE);
    if (flags != 1 && flags != 2)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    CUresult result = allocate(&call, MANAGED, bytes, out);
    if (!result)
        regions_find(&machine.regions, *out)->flags = flags;
    return emulator_end(&call, result);
}

static CUresult host_alloc(struct call *call, void **out, size_t bytes, unsigned flags)
{
    uint64_t address = 0;
    BEGIN(*call, CONTEXT | UNSAFE);
    if (!out || flags > 7)
        return emulator_end(call, CUDA_ERROR_INVALID_VALUE);
    CUresult result = allocate(call, HOST, bytes, &address);
    if (!result) {
        regions_find(&machine.regions, address)->flags = flags;
        *out = memory_at(address);
    }
    return emulator_end(call, result);
}

API cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    struct call call = CALL("cuMemHostAlloc", .bytes = bytes);
    return host_alloc(&call, out, bytes, flags);
}

API cuMemAllocHost_v2(void **out, size_t bytes)
{
    struct call call = CALL("cuMemAllocHost", .bytes = bytes);
    return host_alloc(&call, out, bytes, 0);
}

/* An address that begins no allocation. */
CUresult unknown_address(struct call *call, uint64_t address)
{
    const struct region *inside = regions_find(&machine.regions, address);
    const struct region *freed = regions_find(&machine.freed, address);
    unsigned long long shown = address;
    if (inside)
        complain("%s: 0x%llx is inside of an allocation, not its start", call->name, shown);
    else if (freed && freed->address == address)
        complain("%s: 0x%llx was freed twice", call->name, shown);
    else
        complain("%s: 0x%llx is an unknown pointer", call->name, shown);
    return CUDA_ERROR_INVALID_VALUE;
}

static struct region *region_at(uint64_t address)
{
    struct region *region = regions_find(&machine.regions, address);
    return region && region->address == address ? region : NULL;
}

API cuMemFree_v2(CUdeviceptr address)
{
    struct call call = CALL("cuMemFree", .address = address);
    BEGIN(call, FREEING | CONTEXT | UNSAFE);
    struct region *region = region_at(address);
    if (!region || region->freeing)
        return emulator_end(&call, unknown_address(&call, address));
    call.bytes = region->bytes;
    if (region->kind != DEVICE && region->kind != MANAGED && region->kind != POOLED) {
        complain("cuMemFree: 0x%llx is not memory of a device", (unsigned long long)address);
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    CUresult result = wait_device(&call, region->device);
    if (result)
        return emulator_end(&call, result);
    /* Somebody else may have freed it while this caller waited. */
    if (!(region = region_at(address)))
        return emulator_end(&call, unknown_address(&call, address));
    if (work_uses(region->address, region->bytes))
        complain("cuMemFree: 0x%llx is used by work that is pending on another device",
                 (unsigned long long)address);
    region_free(region, DEAD);
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemFreeHost(void *pointer)
{
    struct call call = CALL("cuMemFreeHost", .address = NUMBER(pointer));
    BEGIN(call, FREEING | CONTEXT | UNSAFE);
    struct region *region = region_at(call.address);
    if (!region || region->kind != HOST)
        return emulator_end(&call, unknown_address(&call, call.address));
    call.bytes = region->bytes;
    if (work_uses(region->address, region->bytes))
        complain("cuMemFreeHost: 0x%llx is used by work that is pending",
                 (unsigned long long)region->address);
    region_free(region, DEAD);
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags)
{
    struct call call = CALL("cuMemHostRegister", .bytes = bytes, .address = NUMBER(pointer));
    BEGIN(call, CONTEXT | UNSAFE);
    if (!pointer || !bytes || flags > 15)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    if (!regions_clear(&machine.regions, call.address, bytes))
        return emulator_end(&call, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    struct region *region = calloc(1, sizeof *region);
    if (!region)
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    *region = (struct region){.state = ALIVE, .address = call.address, .bytes = bytes,
                              .kind = REGISTERED, .device = call.context->device,
                              .context = call.context, .flags = flags, .ready = true,
                              .id = ++machine.next_id};
    forget_freed(&machine.freed, call.address, bytes);
    regions_insert(&machine.regions, region);
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemHostUnregister(void *pointer)
{
    struct call call = CALL("cuMemHostUnregister", .address = NUMBER(pointer));
    BEGIN(call, FREEING | CONTEXT | UNSAFE);
    struct region *region = region_at(call.address);
    if (!region || region->kind != REGISTERED) {
        unknown_address(&call, call.address);
        return emulator_end(&call, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    }
    call.bytes = region->bytes;
    if (work_uses(region->address, region->bytes))
        complain("cuMemHostUnregister: 0x%llx is used by work that is pending",
                 (unsigned long long)region->address);
    region_free(region, DEAD);
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *pointer, unsigned flags)
{
    struct call call = CALL("cuMemHostGetDevicePointer", .address = NUMBER(pointer));
    BEGIN(call, CONTEXT);
    const struct region *region = regions_find(&machine.regions, call.address);
    if (!out || flags || !region || (region->kind != HOST && region->kind != REGISTERED))
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    *out = call.address;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemHostGetFlags(unsigned *out, void *pointer)
{
    struct call call = CALL("cuMemHostGetFlags", .address = NUMBER(pointer));
    BEGIN(call, CONTEXT);
    const struct region *region = regions_find(&machine.regions, call.address);
    if (!out || !region || region->kind != HOST)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    *out = region->flags;
    return emulator_end(&call, CUDA_SUCCESS);
}

/* Of mapped memory a driver tells one mapping, not the reservation. */
API cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    struct call call = CALL("cuMemGetAddressRange", .address = address);
    BEGIN(call, CONTEXT);
    const struct region *region = regions_find(&machine.regions, address);
    if (!region)
        return emulator_end(&call, CUDA_ERROR_NOT_FOUND);
    if (base)
        *base = region->address;
    if (bytes)
        *bytes = region->bytes;
    return emulator_end(&call, CUDA_SUCCESS);
}
