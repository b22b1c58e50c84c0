/* Copies and fills. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

static bool in_range(const struct range *range, uint64_t address)
{
    return range->base && address - range->base < range->bytes;
}

/* Is this an address that only the driver gives out? */
static bool is_ours(uint64_t address)
{
    for (int i = 0; i < MAX_DEVICES; i++)
        if (in_range(&machine.devices[i].range, address))
            return true;
    return in_range(&machine.managed, address) || in_range(&machine.host, address) ||
           in_range(&machine.reserved, address);
}

static CUresult bad(const char *name, uint64_t address, size_t bytes, const char *what)
{
    complain("%s: %zu bytes at 0x%llx %s", name, bytes, (unsigned long long)address, what);
    return CUDA_ERROR_INVALID_VALUE;
}

/* Mapped pieces that lie side by side are one stretch of memory. */
static CUresult check_mapped(const char *name, uint64_t address, size_t bytes, bool write,
                             int device)
{
    uint64_t at = address, end = address + bytes;
    while (at < end) {
        struct region *piece = regions_find(&machine.regions, at);
        if (!piece || piece->kind != MAPPED)
            return bad(name, address, bytes, "cross the end of what is mapped");
        if (!((write ? piece->writable : piece->readable) >> device & 1))
            return bad(name, address, bytes, "are mapped but without access (cuMemSetAccess)");
        at = piece->address + piece->bytes;
    }
    return CUDA_SUCCESS;
}

/* May a copy of this device touch the bytes? Only a host side may be memory we know nothing of. */
CUresult copy_check(const char *name, uint64_t address, size_t bytes, unsigned how, int device)
{
    const struct region *region = regions_find(&machine.regions, address);
    if (!region && is_ours(address))
        return bad(name, address, bytes, "are not allocated");
    if (!region)
        return how & TOUCH_DEVICE ? bad(name, address, bytes, "are not memory of a device")
                                  : CUDA_SUCCESS;
    if (region->kind == MAPPED)
        return check_mapped(name, address, bytes, how & TOUCH_WRITE, device);
    if (bytes > region->address + region->bytes - address)
        return bad(name, address, bytes, "cross the end of an allocation");
    if ((how & TOUCH_NOW) && !region->ready)
        return bad(name, address, bytes, "are used before their stream has allocated them");
    return CUDA_SUCCESS;
}

/* The memory may have gone while the work was waiting. */
void copy_run(struct work *work)
{
    int device = work->stream->context->device;
    if (copy_check(work->name, work->to, work->bytes, work->to_how | TOUCH_NOW, device))
        return;
    if (work->action == FILL) {
        unsigned char *to = memory_at(work->to);
        for (size_t i = 0; i < work->bytes; i += work->unit)
            memcpy(to + i, &work->value, work->unit);
        return;
    }
    if (!work->staged &&
        copy_check(work->name, work->from, work->bytes, work->from_how | TOUCH_NOW, device))
        return;
    memmove(memory_at(work->to), work->staged ? work->staged : memory_at(work->from), work->bytes);
}

static bool pageable(uint64_t address)
{
    return !is_ours(address) && !regions_find(&machine.regions, address);
}

/* Takes a pageable source at once, as the driver does with its staging buffer. */
static CUresult stage(struct work *work)
{
    if (work->action != COPY || !pageable(work->from))
        return CUDA_SUCCESS;
    work->staged = malloc(work->bytes);
    if (!work->staged)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(work->staged, memory_at(work->from), work->bytes);
    return CUDA_SUCCESS;
}

static CUresult check(const struct work *work, const struct stream *stream)
{
    int device = stream->context->device;
    CUresult result = copy_check(work->name, work->to, work->bytes, work->to_how, device);
    if (!result && work->action == COPY)
        result = copy_check(work->name, work->from, work->bytes, work->from_how, device);
    return result;
}

static bool on_host(uint64_t address)
{
    const struct region *region = regions_find(&machine.regions, address);
    return !region || region->kind == HOST || region->kind == REGISTERED;
}

/* Queues what the model describes. A copy to pageable memory has arrived when the call returns,
 * whatever its name says. */
static CUresult transfer(struct call *call, CUstream handle, const struct work *model, bool block)
{
    struct stream *stream = NULL;
    bool taken = false;
    BEGIN(*call, CONTEXT);
    CUresult result = stream_resolve(call, handle, &stream);
    /* The host does not wait for a copy between memory of devices. */
    block = block && (on_host(model->to) || on_host(model->from));
    if (!result && block)
        result = capture_forbids(thread_now());
    if (!result)
        result = capture_enter(stream, &taken);
    if (!result && taken && block)
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (result || taken || !model->bytes)
        return emulator_end(call, result);
    struct work *work = work_new(call, model->action);
    if (!work)
        return emulator_end(call, CUDA_ERROR_OUT_OF_MEMORY);
    work->to = model->to;
    work->from = model->from;
    work->to_how = model->to_how | TOUCH_WRITE;
    work->from_how = model->from_how;
    work->bytes = model->bytes;
    work->unit = model->unit;
    work->value = model->value;
    result = check(work, stream);
    if (!result)
        result = stage(work);
    if (result) {
        free(work);
        return emulator_end(call, result);
    }
    if (block || (work->action == COPY && pageable(work->to)))
        return emulator_end(call, work_block(call, work, stream));
    return emulator_end(call, work_queue(work, stream));
}

#define COPY_CALL(entry, to_, bytes_, stream_) \
    CALL(entry, .address = NUMBER(to_), .bytes = bytes_, .stream = NUMBER(stream_))
#define COPY_WORK(to_, to_how_, from_, from_how_, bytes_) \
    &(struct work){.action = COPY, .to = NUMBER(to_), .to_how = to_how_, .from = NUMBER(from_), \
                   .from_how = from_how_, .bytes = bytes_}
enum { ANY = 0, ON_DEVICE = TOUCH_DEVICE };

CUresult copy_any(const char *name, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream,
                  bool block)
{
    struct call call = COPY_CALL(name, to, bytes, stream);
    return transfer(&call, stream, COPY_WORK(to, ANY, from, ANY, bytes), block);
}

CUresult copy_in(const char *name, CUdeviceptr to, const void *from, size_t bytes, CUstream stream,
                 bool block)
{
    struct call call = COPY_CALL(name, to, bytes, stream);
    return transfer(&call, stream, COPY_WORK(to, ON_DEVICE, from, ANY, bytes), block);
}

CUresult copy_out(const char *name, void *to, CUdeviceptr from, size_t bytes, CUstream stream,
                  bool block)
{
    struct call call = COPY_CALL(name, to, bytes, stream);
    return transfer(&call, stream, COPY_WORK(to, ANY, from, ON_DEVICE, bytes), block);
}

CUresult copy_over(const char *name, CUdeviceptr to, CUdeviceptr from, size_t bytes,
                   CUstream stream)
{
    struct call call = COPY_CALL(name, to, bytes, stream);
    return transfer(&call, stream, COPY_WORK(to, ON_DEVICE, from, ON_DEVICE, bytes), false);
}

CUresult copy_fill(const char *name, CUdeviceptr to, unsigned value, unsigned unit, size_t count,
                   CUstream stream)
{
    struct call call = COPY_CALL(name, to, count * unit, stream);
    return transfer(&call, stream,
                    &(struct work){.action = FILL, .to = to, .to_how = ON_DEVICE, .unit = unit,
                                   .value = value, .bytes = count * unit},
                    false);
}

API cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy_any("cuMemcpy", to, from, bytes, NULL, true);
}

API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_any("cuMemcpyAsync", to, from, bytes, stream, false);
}

API cuMemcpyPeer(CUdeviceptr to, CUcontext one, CUdeviceptr from, CUcontext other, size_t bytes)
{
    (void)one, (void)other;
    return copy_over("cuMemcpyPeer", to, from, bytes, NULL);
}

API cuMemcpyPeerAsync(CUdeviceptr to, CUcontext one, CUdeviceptr from, CUcontext other,
                      size_t bytes, CUstream stream)
{
    (void)one, (void)other;
    return copy_over("cuMemcpyPeerAsync", to, from, bytes, stream);
}

API cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
    return copy_in("cuMemcpyHtoD", to, from, bytes, NULL, true);
}

API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    return copy_in("cuMemcpyHtoDAsync", to, from, bytes, stream, false);
}

API cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    return copy_out("cuMemcpyDtoH", to, from, bytes, NULL, true);
}

API cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_out("cuMemcpyDtoHAsync", to, from, bytes, stream, false);
}

API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy_over("cuMemcpyDtoD", to, from, bytes, NULL);
}

API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_over("cuMemcpyDtoDAsync", to, from, bytes, stream);
}

API cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    return copy_fill("cuMemsetD8", to, value, 1, count, NULL);
}

API cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count)
{
    return copy_fill("cuMemsetD16", to, value, 2, count, NULL);
}

API cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count)
{
    return copy_fill("cuMemsetD32", to, value, 4, count, NULL);
}

API cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
{
    return copy_fill("cuMemsetD8Async", to, value, 1, count, stream);
}

API cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream)
{
    return copy_fill("cuMemsetD16Async", to, value, 2, count, stream);
}

API cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream)
{
    return copy_fill("cuMemsetD32Async", to, value, 4, count, stream);
}
