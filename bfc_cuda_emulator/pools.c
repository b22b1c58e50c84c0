/* Stream-ordered memory: pools, and what is allocated and freed in the order of a stream.
 *
 * A pool reserves exactly what is in use at its height, where a real one reserves in big steps. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

enum {
    REUSE_FIRST = 1,
    REUSE_LAST = 3,
    RELEASE_THRESHOLD = 4,
    RESERVED_CURRENT = 5,
    RESERVED_HIGH = 6,
    USED_CURRENT = 7,
    USED_HIGH = 8,
    ALLOCATION_TYPE = 9,
    HANDLE_TYPES = 10,
    LOCATION_ID = 11,
    LOCATION_TYPE = 12,
    MAX_SIZE = 13,
    TYPE_PINNED = 1,
    TYPE_MANAGED = 2,
    HOST_POOL = MAX_DEVICES,
    MANAGED_POOL = MAX_DEVICES + 1,
};

struct properties {
    int type, handle_types;
    struct location location;
    void *security;
    size_t limit;
    unsigned short usage;
    unsigned char reserved[54];
};

static void pool_begin(struct pool *pool, int location, int device, int type)
{
    *pool = (struct pool){.state = ALIVE, .location = location, .device = device, .type = type,
                          .reuse = {1, 1, 1}};
    if (location == AT_DEVICE)
        pool->access[device] = 3;
}

static bool on_device(const struct pool *pool)
{
    return pool->location == AT_DEVICE && pool->type == TYPE_PINNED;
}

static void set_reserved(struct pool *pool, size_t bytes)
{
    if (on_device(pool))
        machine.devices[pool->device].used += bytes - pool->reserved;
    pool->reserved = bytes;
    if (bytes > pool->reserved_high)
        pool->reserved_high = bytes;
}

static void trim(struct pool *pool, uint64_t keep)
{
    size_t least = pool->used > keep ? pool->used : (size_t)keep;
    if (pool->state == ALIVE && least < pool->reserved)
        set_reserved(pool, least);
}

/* Calls something for every pool of a device. */
static void each_pool(int device, void (*visit)(struct pool *, size_t *), size_t *argument)
{
    visit(&machine.default_pools[device], argument);
    for (size_t i = 0; i < machine.pools.high; i++) {
        struct pool *pool = (struct pool *)(machine.pools.base + i * machine.pools.size);
        if (pool->state == ALIVE && pool->device == device)
            visit(pool, argument);
    }
}

static void trim_to_threshold(struct pool *pool, size_t *unused)
{
    (void)unused;
    trim(pool, pool->threshold);
}

static void give_back(struct pool *pool, size_t *wanted)
{
    size_t spare = on_device(pool) ? pool->reserved - pool->used : 0;
    size_t part = spare < *wanted ? spare : *wanted;
    set_reserved(pool, pool->reserved - part);
    *wanted -= part;
}

/* A call that waited for work lets the pools return what they keep beyond their threshold. */
void pools_trim_idle(int device)
{
    each_pool(device, trim_to_threshold, NULL);
}

size_t pools_give_back(int device, size_t wanted)
{
    size_t left = wanted;
    each_pool(device, give_back, &left);
    return wanted - left;
}

static struct pool *pool_find(CUmemoryPool handle)
{
    const char *place = (const char *)handle, *first = (const char *)machine.default_pools;
    if (place >= first && place < first + sizeof machine.default_pools)
        return handle->state == ALIVE ? handle : NULL;
    struct pool *pool = slab_find(&machine.pools, handle);
    return pool && pool->state == ALIVE ? pool : NULL;
}

/* The handles of the default pools stay the same for ever: cuda.core keeps them. */
void pools_reset(void)
{
    for (size_t i = 0; i < machine.pools.high; i++) {
        struct pool *pool = (struct pool *)(machine.pools.base + i * machine.pools.size);
        if (pool->state == ALIVE)
            pool->state = STALE;
    }
    for (int i = 0; i < MAX_DEVICES; i++) {
        pool_begin(&machine.default_pools[i], AT_DEVICE, i, TYPE_PINNED);
        machine.devices[i].pool = &machine.default_pools[i];
    }
    pool_begin(&machine.default_pools[HOST_POOL], AT_HOST, 0, TYPE_PINNED);
    pool_begin(&machine.default_pools[MANAGED_POOL], AT_DEVICE, 0, TYPE_MANAGED);
}

static size_t charged(size_t bytes)
{
    return align_up(bytes, 512);
}

void pool_uncharge(struct region *region)
{
    region->pool->used -= charged(region->bytes);
}

static CUresult charge(struct pool *pool, size_t bytes)
{
    size_t used = pool->used + charged(bytes);
    size_t more = used > pool->reserved ? used - pool->reserved : 0;
    if (bytes > SIZE_MAX / 2 || (pool->limit && used > pool->limit))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (on_device(pool) && more > device_free(pool->device)) {
        pools_give_back(pool->device, more - device_free(pool->device));
        if (more > device_free(pool->device))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pool->used = used;
    if (more)
        set_reserved(pool, used);
    if (used > pool->used_high)
        pool->used_high = used;
    return CUDA_SUCCESS;
}

static struct range *range_of(const struct pool *pool)
{
    if (pool->type == TYPE_MANAGED)
        return &machine.managed;
    return pool->location == AT_DEVICE ? &machine.devices[pool->device].range : &machine.host;
}

static CUresult allocate(struct call *call, uint64_t *out, struct pool *pool, struct stream *stream)
{
    bool taken = false;
    CUresult result = out && call->bytes ? capture_enter(stream, &taken) : CUDA_ERROR_INVALID_VALUE;
    if (!result)
        result = charge(pool, call->bytes);
    if (result)
        return result;
    struct work *work = work_new(call, ALLOC);
    struct region *region = region_new(range_of(pool), call->bytes, 512, POOLED);
    if (!work || !region) {
        free(work);
        pool->used -= charged(call->bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    region->device = pool->device;
    region->context = &machine.primaries[pool->device];
    region->pool = pool;
    region->ready = false;
    region->of_graph = taken;
    *out = call->address = work->to = region->address;
    return taken ? capture_add(work, stream) : work_queue(work, stream);
}

static struct region *region_of(const struct work *work)
{
    struct region *region = regions_find(&machine.regions, work->to);
    return region && region->address == work->to && region->kind == POOLED ? region : NULL;
}

/* The stream has come to the allocation. */
void pool_commit(struct work *work)
{
    struct region *region = region_of(work);
    if (region)
        region->ready = true;
}

/* The stream has come to the free. */
void pool_finish(struct work *work)
{
    struct region *region = region_of(work);
    if (!region)
        return;
    if (work_uses(region->address, region->bytes))
        complain("%s: 0x%llx is used by work that is pending on another stream", work->name,
                 (unsigned long long)region->address);
    if (region->of_graph)
        region->ready = region->freeing = region->left = false; /* the next launch has it again */
    else
        region_free(region, DEAD);
}

API cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream handle)
{
    struct call call = CALL("cuMemAllocAsync", .bytes = bytes, .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, CONTEXT);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result)
        result = allocate(&call, out, machine.devices[stream->context->device].pool, stream);
    return emulator_end(&call, result);
}

API cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream handle)
{
    struct call call = CALL("cuMemAllocFromPoolAsync", .bytes = bytes, .stream = NUMBER(handle));
    struct stream *stream = NULL;
    BEGIN(call, CONTEXT);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result && !pool_find(pool))
        result = CUDA_ERROR_INVALID_VALUE;
    if (!result)
        result = allocate(&call, out, pool, stream);
    return emulator_end(&call, result);
}

API cuMemFreeAsync(CUdeviceptr address, CUstream handle)
{
    struct call call = CALL("cuMemFreeAsync", .address = address, .stream = NUMBER(handle));
    struct stream *stream = NULL;
    bool taken = false;
    BEGIN(call, FREEING | STARTED);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result)
        result = capture_enter(stream, &taken);
    if (result)
        return emulator_end(&call, result);
    struct region *region = regions_find(&machine.regions, address);
    if (!region || region->address != address)
        return emulator_end(&call, unknown_address(&call, address));
    call.bytes = region->bytes;
    if (region->kind != POOLED || region->freeing) {
        complain("cuMemFreeAsync: 0x%llx %s", (unsigned long long)address,
                 region->freeing ? "was freed twice" : "is not from cuMemAllocAsync");
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    if (taken && !(graph_has(stream->capture->graph, ALLOC, address) &&
                   !graph_has(stream->capture->graph, FREE, address))) {
        capture_invalidate(stream->capture); /* a graph frees only what it has allocated */
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    struct work *work = work_new(&call, FREE);
    if (!work)
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    work->to = address;
    if (taken)
        return emulator_end(&call, capture_add(work, stream));
    region->freeing = true;
    return emulator_end(&call, work_queue(work, stream));
}

API cuMemPoolCreate(CUmemoryPool *out, const struct properties *wanted)
{
    struct call call = CALL("cuMemPoolCreate");
    BEGIN(call, STARTED);
    if (!out || !wanted || wanted->type < TYPE_PINNED || wanted->type > TYPE_MANAGED)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    int place = wanted->location.type;
    bool host = place == AT_HOST || place == AT_HOST_NODE;
    if (!host && wanted->type == TYPE_PINNED && !device_known(wanted->location.id))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    struct pool *pool = slab_take(&machine.pools);
    if (!pool)
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    int device = device_known(wanted->location.id) ? wanted->location.id : 0;
    pool_begin(pool, host ? place : AT_DEVICE, device, wanted->type);
    pool->limit = wanted->limit;
    pool->handle_types = wanted->handle_types;
    *out = pool;
    return emulator_end(&call, CUDA_SUCCESS);
}

/* Allocations outlive the handle; the last free lets the memory go. */
API cuMemPoolDestroy(CUmemoryPool handle)
{
    struct call call = CALL("cuMemPoolDestroy");
    BEGIN(call, STARTED);
    struct pool *pool = slab_find(&machine.pools, handle);
    if (pool && pool->state == STALE)
        return emulator_end(&call, CUDA_SUCCESS);
    if (!pool || pool->state != ALIVE) {
        complain("cuMemPoolDestroy: 0x%llx is no pool", (unsigned long long)NUMBER(handle));
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    if (pool->used)
        complain("cuMemPoolDestroy: %zu bytes of the pool are in use", pool->used);
    trim(pool, 0);
    for (int i = 0; i < MAX_DEVICES; i++)
        if (machine.devices[i].pool == pool)
            machine.devices[i].pool = &machine.default_pools[i];
    if (!pool->used)
        pool->state = DEAD;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemPoolTrimTo(CUmemoryPool handle, size_t keep)
{
    struct call call = CALL("cuMemPoolTrimTo", .bytes = keep);
    BEGIN(call, STARTED);
    struct pool *pool = pool_find(handle);
    if (pool)
        trim(pool, keep);
    return emulator_end(&call, pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

static bool get_attribute(const struct pool *pool, int attribute, void *out)
{
    const uint64_t wide[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used,
                             pool->used_high};
    if (attribute >= RELEASE_THRESHOLD && attribute <= USED_HIGH)
        *(uint64_t *)out = wide[attribute - RELEASE_THRESHOLD];
    else if (attribute >= REUSE_FIRST && attribute <= REUSE_LAST)
        *(int *)out = pool->reuse[attribute - REUSE_FIRST];
    else if (attribute == MAX_SIZE)
        *(uint64_t *)out = pool->limit;
    else if (attribute == ALLOCATION_TYPE)
        *(int *)out = pool->type;
    else if (attribute == HANDLE_TYPES)
        *(int *)out = pool->handle_types;
    else if (attribute == LOCATION_ID)
        *(int *)out = pool->device;
    else if (attribute == LOCATION_TYPE)
        *(int *)out = pool->location;
    else
        return false;
    return true;
}

API cuMemPoolGetAttribute(CUmemoryPool handle, int attribute, void *out)
{
    struct call call = CALL("cuMemPoolGetAttribute");
    BEGIN(call, STARTED);
    struct pool *pool = pool_find(handle);
    bool found = pool && out && get_attribute(pool, attribute, out);
    return emulator_end(&call, found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

API cuMemPoolSetAttribute(CUmemoryPool handle, int attribute, void *value)
{
    struct call call = CALL("cuMemPoolSetAttribute");
    BEGIN(call, STARTED);
    struct pool *pool = pool_find(handle);
    if (!pool || !value)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    if (attribute >= REUSE_FIRST && attribute <= REUSE_LAST)
        pool->reuse[attribute - REUSE_FIRST] = *(int *)value;
    else if (attribute == RELEASE_THRESHOLD)
        pool->threshold = *(uint64_t *)value;
    else if (attribute == RESERVED_HIGH && !*(uint64_t *)value)
        pool->reserved_high = pool->reserved;
    else if (attribute == USED_HIGH && !*(uint64_t *)value)
        pool->used_high = pool->used;
    else
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemPoolSetAccess(CUmemoryPool handle, const struct access *list, size_t count)
{
    struct call call = CALL("cuMemPoolSetAccess");
    BEGIN(call, STARTED);
    struct pool *pool = pool_find(handle);
    if (!pool || (count && !list))
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        if (list[i].location.type != AT_DEVICE)
            continue;
        if (!device_known(list[i].location.id))
            return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
        pool->access[list[i].location.id] = (uint64_t)list[i].flags;
    }
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemPoolGetAccess(int *out, CUmemoryPool handle, const struct location *location)
{
    struct call call = CALL("cuMemPoolGetAccess");
    BEGIN(call, STARTED);
    struct pool *pool = pool_find(handle);
    if (!pool || !out || !location)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    bool host = location->type != AT_DEVICE;
    if (!host && !device_known(location->id))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    *out = host ? (on_device(pool) ? 0 : 3) : (int)pool->access[location->id];
    return emulator_end(&call, CUDA_SUCCESS);
}

static CUresult pool_of_device(struct call *call, CUmemoryPool *out, int device, bool chosen)
{
    BEGIN(*call, STARTED);
    if (!device_known(device))
        return emulator_end(call, CUDA_ERROR_INVALID_DEVICE);
    if (!out)
        return emulator_end(call, CUDA_ERROR_INVALID_VALUE);
    *out = chosen ? machine.devices[device].pool : &machine.default_pools[device];
    return emulator_end(call, CUDA_SUCCESS);
}

API cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device)
{
    struct call call = CALL("cuDeviceGetDefaultMemPool");
    return pool_of_device(&call, out, device, false);
}

API cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device)
{
    struct call call = CALL("cuDeviceGetMemPool");
    return pool_of_device(&call, out, device, true);
}

API cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    struct call call = CALL("cuDeviceSetMemPool");
    BEGIN(call, STARTED);
    if (!device_known(device))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    if (!pool_find(pool) || pool->device != device)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    machine.devices[device].pool = pool;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemGetDefaultMemPool(CUmemoryPool *out, const struct location *location, int type)
{
    struct call call = CALL("cuMemGetDefaultMemPool");
    BEGIN(call, STARTED);
    if (!out || !location)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    int which = type == TYPE_MANAGED              ? MANAGED_POOL
                : location->type != AT_DEVICE     ? HOST_POOL
                : device_known(location->id)      ? location->id
                                                  : -1;
    if (which < 0)
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    *out = &machine.default_pools[which];
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemGetMemPool(CUmemoryPool *out, const struct location *location, int type)
{
    return cuMemGetDefaultMemPool(out, location, type);
}
