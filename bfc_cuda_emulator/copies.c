/* Copies and fills. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

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
    if (!region && range_holding(address))
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

static size_t reach(const struct work *work, size_t pitch, size_t slice)
{
    const struct rows *rows = &work->rows;
    return rows->height ? (rows->depth - 1) * slice + (rows->height - 1) * pitch + work->bytes
                        : work->bytes;
}

/* How many bytes lie between the first one written and the end of the last. */
size_t copy_reach_to(const struct work *work)
{
    return reach(work, work->rows.to_pitch, work->rows.to_slice);
}

size_t copy_reach_from(const struct work *work)
{
    return reach(work, work->rows.from_pitch, work->rows.from_slice);
}

static void move_rows(struct work *work)
{
    const struct rows *rows = &work->rows;
    char *to = memory_at(work->to);
    const char *from = work->staged ? work->staged : memory_at(work->from);
    for (size_t slice = 0; slice < rows->depth; slice++)
        for (size_t row = 0; row < rows->height; row++)
            memmove(to + slice * rows->to_slice + row * rows->to_pitch,
                    from + slice * rows->from_slice + row * rows->from_pitch, work->bytes);
}

/* The memory may have gone while the work was waiting. */
void copy_run(struct work *work)
{
    int device = work->stream->context->device;
    if (copy_check(work->name, work->to, copy_reach_to(work), work->to_how | TOUCH_NOW, device))
        return;
    if (work->action == FILL && work->unit == 1) {
        memset(memory_at(work->to), (int)work->value, work->bytes);
        return;
    }
    if (work->action == FILL) {
        unsigned char *to = memory_at(work->to);
        for (size_t i = 0; i < work->bytes; i += work->unit)
            memcpy(to + i, &work->value, work->unit);
        return;
    }
    if (!work->staged && copy_check(work->name, work->from, copy_reach_from(work),
                                    work->from_how | TOUCH_NOW, device))
        return;
    if (work->rows.height)
        move_rows(work);
    else
        memmove(memory_at(work->to), work->staged ? work->staged : memory_at(work->from),
                work->bytes);
}

static bool pageable(uint64_t address)
{
    return !range_holding(address) && !regions_find(&machine.regions, address);
}

/* Takes a pageable source at once, as the driver does with its staging buffer. */
static CUresult stage(struct work *work)
{
    if (work->action != COPY || !pageable(work->from))
        return CUDA_SUCCESS;
    work->staged = malloc(copy_reach_from(work));
    if (!work->staged)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(work->staged, memory_at(work->from), copy_reach_from(work));
    return CUDA_SUCCESS;
}

static CUresult check(const struct work *work, const struct stream *stream)
{
    int device = stream->context->device;
    CUresult result = copy_check(work->name, work->to, copy_reach_to(work), work->to_how, device);
    if (!result && work->action == COPY)
        result = copy_check(work->name, work->from, copy_reach_from(work), work->from_how, device);
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
    if (!result && taken && block) {
        capture_invalidate(stream->capture);
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (result || !model->bytes)
        return emulator_end(call, result);
    struct work *work = work_new(call, model->action);
    if (!work)
        return emulator_end(call, CUDA_ERROR_OUT_OF_MEMORY);
    work->to = model->to;
    work->from = model->from;
    work->to_how = model->to_how | TOUCH_WRITE;
    work->from_how = model->from_how;
    work->bytes = model->bytes;
    work->rows = model->rows;
    work->unit = model->unit;
    work->value = model->value;
    result = check(work, stream);
    if (!result && !taken)
        result = stage(work); /* a graph reads its source when it runs */
    if (result) {
        free(work);
        if (taken)
            capture_invalidate(stream->capture);
        return emulator_end(call, result);
    }
    if (taken)
        return emulator_end(call, capture_add(work, stream));
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

enum memory_type { TYPE_HOST = 1, TYPE_DEVICE, TYPE_ARRAY, TYPE_UNIFIED };

/* CUDA_MEMCPY2D and CUDA_MEMCPY3D begin alike on each side; `z` and `rows` are of the second. */
struct side {
    size_t x, y, z;
    enum memory_type type;
    const void *host;
    CUdeviceptr device;
    size_t pitch, rows;
};

static CUresult locate(const char *name, const struct side *side, size_t width, size_t height,
                       uint64_t *address, unsigned *how)
{
    if (side->type != TYPE_HOST && side->type != TYPE_DEVICE && side->type != TYPE_UNIFIED)
        return CUDA_ERROR_NOT_SUPPORTED; /* arrays */
    *how = side->type == TYPE_DEVICE ? ON_DEVICE : ANY;
    *address = side->type == TYPE_HOST ? NUMBER(side->host) : side->device;
    *address += (side->z * side->rows + side->y) * side->pitch + side->x;
    if (height > 1 && side->pitch < side->x + width) {
        complain("%s: rows of %zu bytes lie %zu apart", name, width, side->pitch);
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

static CUresult copy_rows(const char *name, struct side to, struct side from, size_t width,
                          size_t height, size_t depth, CUstream stream)
{
    struct call call = CALL(name, .stream = NUMBER(stream), .bytes = width * height * depth);
    struct work model = {.action = COPY, .bytes = width};
    CUresult result = locate(name, &to, width, height, &model.to, &model.to_how);
    if (!result)
        result = locate(name, &from, width, height, &model.from, &model.from_how);
    if (!result && depth > 1 && (to.rows < height || from.rows < height))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result) {
        BEGIN(call, CONTEXT);
        return emulator_end(&call, result);
    }
    call.address = model.to;
    model.rows = (struct rows){height, depth, to.pitch, from.pitch, to.rows * to.pitch,
                               from.rows * from.pitch};
    if (!height || !depth)
        model.bytes = 0;
    return transfer(&call, stream, &model, false);
}

struct flat_side {
    size_t x, y;
    enum memory_type type;
    const void *host;
    CUdeviceptr device;
    void *array;
    size_t pitch;
};

struct flat_copy {
    struct flat_side from, to;
    size_t width, height;
};

static struct side of_flat(const struct flat_side *side)
{
    return (struct side){.x = side->x, .y = side->y, .type = side->type, .host = side->host,
                         .device = side->device, .pitch = side->pitch};
}

API cuMemcpy2DAsync_v2(const struct flat_copy *copy, CUstream stream)
{
    return copy_rows("cuMemcpy2DAsync", of_flat(&copy->to), of_flat(&copy->from), copy->width,
                     copy->height, 1, stream);
}

struct deep_side {
    size_t x, y, z, level;
    enum memory_type type;
    const void *host;
    CUdeviceptr device;
    void *array, *reserved;
    size_t pitch, rows;
};

struct deep_copy {
    struct deep_side from, to;
    size_t width, height, depth;
};

static struct side of_deep(const struct deep_side *side)
{
    return (struct side){.x = side->x, .y = side->y, .z = side->z, .type = side->type,
                         .host = side->host, .device = side->device, .pitch = side->pitch,
                         .rows = side->rows};
}

API cuMemcpy3DAsync_v2(const struct deep_copy *copy, CUstream stream)
{
    return copy_rows("cuMemcpy3DAsync", of_deep(&copy->to), of_deep(&copy->from), copy->width,
                     copy->height, copy->depth, stream);
}
