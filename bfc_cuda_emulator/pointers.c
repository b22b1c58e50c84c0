/* What is asked of an address, and the hints for managed memory. */
#include "emulator.h"

#include <string.h>

enum attribute {
    POINTER_CONTEXT = 1,
    POINTER_MEMORY_TYPE = 2,
    POINTER_DEVICE_POINTER = 3,
    POINTER_HOST_POINTER = 4,
    POINTER_SYNC_MEMOPS = 6,
    POINTER_BUFFER_ID = 7,
    POINTER_IS_MANAGED = 8,
    POINTER_DEVICE_ORDINAL = 9,
    POINTER_IS_LEGACY_IPC_CAPABLE = 10,
    POINTER_RANGE_START = 11,
    POINTER_RANGE_SIZE = 12,
    POINTER_MAPPED = 13,
    POINTER_ALLOWED_HANDLE_TYPES = 14,
    POINTER_IS_RDMA_CAPABLE = 15,
    POINTER_ACCESS_FLAGS = 16,
    POINTER_MEMPOOL = 17,
    POINTER_MAPPING_SIZE = 18,
    POINTER_MAPPING_BASE = 19,
    POINTER_BLOCK_ID = 20,
    POINTER_IS_DECOMPRESS_CAPABLE = 21,
    TYPE_HOST = 1,
    TYPE_DEVICE = 2,
    NOWHERE = -2,
};

/* How many bytes an attribute has; 0: no such attribute. */
static size_t width(int attribute)
{
    switch (attribute) {
    case POINTER_CONTEXT:
    case POINTER_DEVICE_POINTER:
    case POINTER_HOST_POINTER:
    case POINTER_BUFFER_ID:
    case POINTER_RANGE_START:
    case POINTER_RANGE_SIZE:
    case POINTER_ALLOWED_HANDLE_TYPES:
    case POINTER_MEMPOOL:
    case POINTER_MAPPING_SIZE:
    case POINTER_MAPPING_BASE:
    case POINTER_BLOCK_ID:
        return 8;
    case POINTER_MEMORY_TYPE:
    case POINTER_SYNC_MEMOPS:
    case POINTER_IS_MANAGED:
    case POINTER_DEVICE_ORDINAL:
    case POINTER_IS_LEGACY_IPC_CAPABLE:
    case POINTER_MAPPED:
    case POINTER_IS_RDMA_CAPABLE:
    case POINTER_ACCESS_FLAGS:
    case POINTER_IS_DECOMPRESS_CAPABLE:
        return 4;
    default:
        return 0;
    }
}

static bool of_host(const struct region *region)
{
    if (region->kind == POOLED)
        return region->pool->location != AT_DEVICE;
    return region->kind == HOST || region->kind == REGISTERED ||
           (region->kind == MAPPED && region->device < 0);
}

static bool managed(const struct region *region)
{
    enum { POOL_MANAGED = 2 };
    if (region->kind == POOLED)
        return region->pool->type == POOL_MANAGED;
    return region->kind == MANAGED;
}

/* Memory of pools and mapped memory belong to no context. */
static uint64_t context_of(const struct region *region)
{
    return region->kind == POOLED || region->kind == MAPPED ? 0 : NUMBER(region->context);
}

static const struct region *whole(const struct region *region)
{
    return region->kind == MAPPED ? regions_find(&machine.reservations, region->address) : region;
}

static uint64_t value_of(const struct region *region, int attribute, uint64_t address)
{
    switch (attribute) {
    case POINTER_CONTEXT:
        return context_of(region);
    case POINTER_MEMORY_TYPE:
        return of_host(region) ? TYPE_HOST : TYPE_DEVICE;
    case POINTER_DEVICE_POINTER:
        return address;
    case POINTER_HOST_POINTER:
        return of_host(region) || managed(region) ? address : 0;
    case POINTER_BUFFER_ID:
    case POINTER_BLOCK_ID:
        return region->id;
    case POINTER_IS_MANAGED:
        return managed(region);
    case POINTER_DEVICE_ORDINAL:
        return (uint64_t)(int64_t)(region->device);
    case POINTER_IS_LEGACY_IPC_CAPABLE:
        return region->kind == DEVICE;
    case POINTER_RANGE_START:
        return whole(region)->address;
    case POINTER_RANGE_SIZE:
        return whole(region)->bytes;
    case POINTER_MAPPED:
        return 1;
    case POINTER_ACCESS_FLAGS:
        return 3;
    case POINTER_MEMPOOL:
        return NUMBER(region->pool);
    case POINTER_MAPPING_SIZE:
        return region->bytes;
    case POINTER_MAPPING_BASE:
        return region->address;
    case POINTER_SYNC_MEMOPS:
        return region->synchronous;
    default:
        return 0;
    }
}

API cuPointerGetAttribute(void *out, int attribute, CUdeviceptr address)
{
    struct call call = CALL("cuPointerGetAttribute", .address = address);
    BEGIN(call, STARTED);
    const struct region *region = regions_find(&machine.regions, address);
    size_t bytes = width(attribute);
    if (!out || !region || !bytes)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    uint64_t value = value_of(region, attribute, address);
    if (attribute == POINTER_HOST_POINTER && !value)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    memcpy(out, &value, bytes); /* the low bytes come first */
    return emulator_end(&call, CUDA_SUCCESS);
}

/* Says nothing of an address that it does not know, and succeeds. */
API cuPointerGetAttributes(unsigned count, const int *attributes, void **out, CUdeviceptr address)
{
    struct call call = CALL("cuPointerGetAttributes", .address = address);
    BEGIN(call, STARTED);
    const struct region *region = regions_find(&machine.regions, address);
    if (!count || !attributes || !out)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < count; i++) {
        uint64_t value = 0;
        if (!width(attributes[i]))
            return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
        if (region)
            value = value_of(region, attributes[i], address);
        else if (attributes[i] == POINTER_DEVICE_ORDINAL)
            value = (uint64_t)(int64_t)NOWHERE;
        memcpy(out[i], &value, width(attributes[i]));
    }
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr address)
{
    struct call call = CALL("cuPointerSetAttribute", .address = address);
    BEGIN(call, STARTED);
    struct region *region = regions_find(&machine.regions, address);
    if (!value || !region || attribute != POINTER_SYNC_MEMOPS)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    region->synchronous = *(const int *)value != 0;
    return emulator_end(&call, CUDA_SUCCESS);
}

/* The range has to lie in one managed allocation. */
static struct region *managed_range(uint64_t address, size_t bytes)
{
    struct region *region = regions_find(&machine.regions, address);
    if (!region || !managed(region) || !bytes ||
        bytes > region->address + region->bytes - address)
        return NULL;
    return region;
}

static CUresult advise(struct call *call, int advice, struct location location)
{
    enum { SET_READ_MOSTLY = 1, UNSET_READ_MOSTLY, SET_PREFERRED, UNSET_PREFERRED, LAST = 6 };
    BEGIN(*call, CONTEXT);
    struct region *region = managed_range(call->address, call->bytes);
    if (!region || advice < SET_READ_MOSTLY || advice > LAST)
        return emulator_end(call, CUDA_ERROR_INVALID_VALUE);
    if (advice == SET_READ_MOSTLY || advice == UNSET_READ_MOSTLY)
        region->read_mostly = advice == SET_READ_MOSTLY;
    if (advice == SET_PREFERRED)
        region->preferred = location;
    if (advice == UNSET_PREFERRED)
        region->preferred = (struct location){0, 0};
    return emulator_end(call, CUDA_SUCCESS);
}

static struct location of_device(int device)
{
    return (struct location){device < 0 ? AT_HOST : AT_DEVICE, device < 0 ? 0 : device};
}

API cuMemAdvise(CUdeviceptr address, size_t bytes, int advice, CUdevice device)
{
    struct call call = CALL("cuMemAdvise", .address = address, .bytes = bytes);
    return advise(&call, advice, of_device(device));
}

API cuMemAdvise_v2(CUdeviceptr address, size_t bytes, int advice, struct location location)
{
    struct call call = CALL("cuMemAdvise", .address = address, .bytes = bytes);
    return advise(&call, advice, location);
}

/* Where the pages are changes nothing here, but the last wish can be asked for. */
static CUresult prefetch(struct call *call, struct location location, CUstream handle)
{
    struct stream *stream = NULL;
    BEGIN(*call, CONTEXT);
    struct region *region = managed_range(call->address, call->bytes);
    CUresult result = region ? stream_resolve(call, handle, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (!result && location.type == AT_DEVICE && !device_known(location.id))
        result = CUDA_ERROR_INVALID_DEVICE;
    if (!result)
        region->prefetched = location;
    return emulator_end(call, result);
}

API cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice device, CUstream stream)
{
    struct call call = CALL("cuMemPrefetchAsync", .address = address, .bytes = bytes,
                            .stream = NUMBER(stream));
    return prefetch(&call, of_device(device), stream);
}

API cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, struct location location,
                          unsigned flags, CUstream stream)
{
    struct call call = CALL("cuMemPrefetchAsync", .address = address, .bytes = bytes,
                            .stream = NUMBER(stream));
    (void)flags;
    return prefetch(&call, location, stream);
}

API cuMemRangeGetAttribute(void *out, size_t size, int attribute, CUdeviceptr address, size_t bytes)
{
    enum { MOSTLY = 1, PREFERRED, ACCESSED_BY, LAST };
    enum { PREFERRED_TYPE = 5, PREFERRED_ID, LAST_TYPE, LAST_ID };
    struct call call = CALL("cuMemRangeGetAttribute", .address = address, .bytes = bytes);
    BEGIN(call, STARTED);
    const struct region *region = managed_range(address, bytes);
    if (!out || size < 4 || !region || attribute < MOSTLY || attribute > LAST_ID)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    bool last = attribute == LAST || attribute >= LAST_TYPE;
    struct location at = last ? region->prefetched : region->preferred;
    int *value = out;
    if (attribute == ACCESSED_BY)
        for (size_t i = 0; i < size / 4; i++)
            value[i] = NOWHERE;
    else if (attribute == MOSTLY)
        *value = region->read_mostly;
    else if (attribute == PREFERRED_TYPE || attribute == LAST_TYPE)
        *value = at.type;
    else if (attribute == PREFERRED_ID || attribute == LAST_ID)
        *value = at.id;
    else
        *value = at.type == AT_DEVICE ? at.id : at.type ? -1 : NOWHERE;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuStreamAttachMemAsync(CUstream handle, CUdeviceptr address, size_t bytes, unsigned flags)
{
    struct call call = CALL("cuStreamAttachMemAsync", .address = address, .bytes = bytes,
                            .stream = NUMBER(handle));
    struct stream *stream = NULL;
    (void)flags;
    BEGIN(call, CONTEXT);
    CUresult result = stream_resolve(&call, handle, &stream);
    if (!result)
        result = capture_forbids_stream(stream); /* no node of a graph does this */
    if (!result && !regions_find(&machine.regions, address))
        result = CUDA_ERROR_INVALID_VALUE;
    return emulator_end(&call, result);
}
