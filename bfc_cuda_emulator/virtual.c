/* Reserved addresses, and the physical memory that is mapped to them.
 *
 * All physical memory is one sparse file, so that what is written through one address is read
 * through another where the same piece is mapped. */
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fcntl.h>

enum { PAGE_OF_PROPERTIES = 128, GRANULARITY = 2 << 20, HOST_BIT = 63, READ = 1, READ_WRITE = 3 };
enum { DESCRIPTOR = 1, FABRIC = 8 }; /* types of handles that other processes may be given */
enum { VIRTUAL_MEMORY = 102, DESCRIPTORS = 103, RDMA = 110, FABRICS = 128 }; /* attributes */

struct wanted {
    int type, handle_types;
    struct location location;
    void *metadata;
    unsigned char compressed, rdma;
    unsigned char flags[6];
};

/* Of what other processes may be given, the properties lie behind all memory, in the same order. */
static const size_t PROPERTIES = (size_t)1 << 46;
struct noted {
    size_t bytes;
    int device;
    unsigned char properties[64];
};

static int file = -1;
static size_t file_end;

static bool aligned(uint64_t number)
{
    return number && number % GRANULARITY == 0;
}

/* Refuses a call that is wrong in itself, with a complaint: the caller should have known. */
static CUresult refuse(struct call *call, const char *problem)
{
    bool has_place = call->address != NO_NUMBER;
    if (has_place)
        complain("%s: 0x%llx %s", call->name, (unsigned long long)call->address, problem);
    else
        complain("%s: %llu bytes %s", call->name, (unsigned long long)call->bytes, problem);
    return emulator_end(call, CUDA_ERROR_INVALID_VALUE);
}

static bool has(int device, int attribute)
{
    return machine.devices[device].attributes[attribute];
}

/* Takes the pages away; the addresses stay reserved. */
static void hide_pages(uint64_t address, size_t bytes)
{
    mmap(memory_at(address), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static size_t *account(const struct physical *physical)
{
    return physical->device < 0 ? &machine.host_used : &machine.devices[physical->device].used;
}

/* The memory lives as long as a handle or a mapping of it does. */
static void physical_let_go(struct physical *physical)
{
    if (physical->handles || physical->mappings)
        return;
    physical->state = DEAD;
    if (physical->is_foreign)
        return;
    *account(physical) -= physical->bytes;
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)physical->offset,
              (off_t)physical->bytes);
}

static void unmap(struct region *region, enum state state)
{
    struct physical *physical = region->physical;
    hide_pages(region->address, region->bytes);
    region_free(region, state);
    physical->mappings--;
    physical_let_go(physical);
}

void virtual_reset(void)
{
    for (size_t i = machine.regions.count; i--;)
        if (machine.regions.items[i]->kind == MAPPED)
            unmap(machine.regions.items[i], STALE);
    for (size_t i = 0; i < machine.physicals.high; i++) {
        struct physical *physical =
            (struct physical *)(machine.physicals.base + i * machine.physicals.size);
        if (physical->state != ALIVE)
            continue;
        physical->handles = physical->mappings = 0;
        physical_let_go(physical);
        physical->state = STALE;
    }
    while (machine.reservations.count)
        reservation_free(machine.reservations.items[machine.reservations.count - 1], STALE);
}

API cuMemGetAllocationGranularity(size_t *out, const struct wanted *wanted, int option)
{
    struct call call = CALL("cuMemGetAllocationGranularity");
    BEGIN(call, STARTED);
    if (!out || !wanted || option < 0 || option > 1)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    if (wanted->location.type == AT_DEVICE && !device_known(wanted->location.id))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    *out = GRANULARITY;
    return emulator_end(&call, CUDA_SUCCESS);
}

/* A wished address is only a wish. */
API cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wish,
                        unsigned long long flags)
{
    struct call call = CALL("cuMemAddressReserve", .bytes = bytes);
    BEGIN(call, STARTED);
    bool odd = alignment & (alignment - 1);
    if (!out || odd || flags)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    if (!aligned(bytes))
        return refuse(&call, "are no multiple of the granularity");
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    struct range *range = &machine.reserved;
    bool granted = aligned(wish) && wish % alignment == 0 && wish >= range->base &&
                   wish - range->base < range->bytes &&
                   bytes <= range->base + range->bytes - wish &&
                   regions_clear(&machine.reservations, wish, bytes);
    struct region *region = granted ? region_put(range, wish, bytes, MAPPED)
                                    : region_new(range, bytes, alignment, MAPPED);
    if (!region)
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    *out = call.address = region->address;
    return emulator_end(&call, CUDA_SUCCESS);
}

/* The first mapped piece that touches the addresses. */
static struct region *mapped_in(uint64_t address, size_t bytes)
{
    struct region *region = regions_find(&machine.regions, address);
    if (!region)
        region = regions_after(&machine.regions, address);
    return region && region->address < address + bytes ? region : NULL;
}

API cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    struct call call = CALL("cuMemAddressFree", .bytes = bytes, .address = address);
    BEGIN(call, STARTED);
    struct region *region = regions_find(&machine.reservations, address);
    const struct region *freed = regions_find(&machine.freed_reservations, address);
    if (!region && freed && freed->state == STALE)
        return emulator_end(&call, CUDA_SUCCESS);
    const char *problem = NULL;
    if (!region)
        problem = freed ? "was freed twice" : "is not reserved";
    else if (region->address != address || region->bytes != bytes)
        problem = "is not all of the reservation";
    else if (mapped_in(address, bytes))
        problem = "has memory mapped to it";
    if (problem) {
        complain("cuMemAddressFree: 0x%llx %s", (unsigned long long)address, problem);
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    reservation_free(region, DEAD);
    return emulator_end(&call, CUDA_SUCCESS);
}

/* Is something wanted that the device cannot do? */
static bool lacks(int device, const struct wanted *wanted)
{
    return !has(device, VIRTUAL_MEMORY) || (wanted->rdma && !has(device, RDMA)) ||
           (wanted->handle_types & DESCRIPTOR && !has(device, DESCRIPTORS)) ||
           (wanted->handle_types & FABRIC && !has(device, FABRICS));
}

static bool open_file(void)
{
    if (file >= 0)
        return true;
    int made = memfd_create("emulated device memory", MFD_CLOEXEC);
    if (made < 0 || ftruncate(made, (off_t)(2 * PROPERTIES))) {
        close(made);
        return false;
    }
    file = made;
    return true;
}

API cuMemCreate(uint64_t *out, size_t bytes, const struct wanted *wanted, unsigned long long flags)
{
    struct call call = CALL("cuMemCreate", .bytes = bytes);
    BEGIN(call, STARTED);
    if (!out || !wanted || wanted->type != 1 || flags)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    if (!aligned(bytes))
        return refuse(&call, "are no multiple of the granularity");
    bool host = wanted->location.type != AT_DEVICE;
    int device = host ? -1 : wanted->location.id;
    if (!host && !device_known(device))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    if (!host && lacks(device, wanted))
        return emulator_end(&call, CUDA_ERROR_NOT_SUPPORTED);
    size_t left = host ? machine.host_total - machine.host_used : device_free(device);
    if (!host && bytes > left)
        left += pools_give_back(device, bytes - left);
    if (bytes > left)
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    struct physical *physical = open_file() ? slab_take(&machine.physicals) : NULL;
    if (!physical)
        return emulator_end(&call, CUDA_ERROR_OUT_OF_MEMORY);
    physical->file = file;
    physical->device = device;
    physical->bytes = bytes;
    physical->offset = file_end;
    physical->handles = 1;
    memcpy(physical->properties, wanted, sizeof *wanted);
    file_end += bytes;
    *account(physical) += bytes;
    *out = call.address = NUMBER(physical);
    return emulator_end(&call, CUDA_SUCCESS);
}

/* For a STALE handle it succeeds with NULL: there is nothing to do. */
CUresult physical_find(struct call *call, uint64_t handle, struct physical **out)
{
    struct physical *physical = slab_find(&machine.physicals, memory_at(handle));
    *out = physical && physical->state == ALIVE && physical->handles ? physical : NULL;
    if (*out || (physical && physical->state == STALE))
        return CUDA_SUCCESS;
    complain("%s: 0x%llx %s", call->name, (unsigned long long)handle,
             physical ? "was released before" : "is no handle of memory");
    return CUDA_ERROR_INVALID_VALUE;
}

API cuMemRelease(uint64_t handle)
{
    struct call call = CALL("cuMemRelease", .address = handle);
    struct physical *physical = NULL;
    BEGIN(call, STARTED);
    CUresult result = physical_find(&call, handle, &physical);
    if (physical) {
        call.bytes = physical->bytes;
        physical->handles--;
        physical_let_go(physical);
    }
    return emulator_end(&call, result);
}

static CUresult map(struct call *call, struct physical *physical)
{
    struct region *region = calloc(1, sizeof *region);
    if (!region)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *region = (struct region){.state = ALIVE, .address = call->address, .bytes = call->bytes,
                              .kind = MAPPED, .physical = physical, .ready = true,
                              .device = physical->device, .id = ++machine.next_id};
    void *place = mmap(memory_at(call->address), call->bytes, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_FIXED | MAP_NORESERVE, physical->file, (off_t)physical->offset);
    if (place == MAP_FAILED || !regions_insert(&machine.regions, region)) {
        free(region);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    physical->mappings++;
    return CUDA_SUCCESS;
}

API cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, uint64_t handle,
             unsigned long long flags)
{
    struct call call = CALL("cuMemMap", .bytes = bytes, .address = address);
    struct physical *physical = NULL;
    BEGIN(call, STARTED);
    if (flags)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    if (!aligned(bytes) || !aligned(address))
        return refuse(&call, "or the size is no multiple of the granularity");
    CUresult result = physical_find(&call, handle, &physical);
    if (!physical)
        return emulator_end(&call, result ? result : CUDA_ERROR_INVALID_VALUE);
    if (offset || bytes != physical->bytes)
        return refuse(&call, "is to have a part of a handle: only all of it can be mapped");
    const struct region *place = regions_find(&machine.reservations, address);
    if (!place || bytes > place->address + place->bytes - address)
        return refuse(&call, "is not in a reservation, or not all of it");
    if (mapped_in(address, bytes))
        return refuse(&call, "is mapped already");
    return emulator_end(&call, map(&call, physical));
}

/* Do whole mapped pieces cover exactly these addresses? */
static bool covered(uint64_t address, size_t bytes)
{
    uint64_t at = address;
    while (at < address + bytes) {
        const struct region *region = regions_find(&machine.regions, at);
        if (!region || region->kind != MAPPED || region->address != at)
            return false;
        at += region->bytes;
    }
    return at == address + bytes;
}

API cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    struct call call = CALL("cuMemUnmap", .bytes = bytes, .address = address);
    BEGIN(call, STARTED);
    unsigned long long shown = address;
    if (!bytes || !covered(address, bytes)) {
        const struct region *freed = regions_find(&machine.freed, address);
        if (freed && freed->state == STALE && !mapped_in(address, bytes))
            return emulator_end(&call, CUDA_SUCCESS);
        complain("cuMemUnmap: %zu bytes at 0x%llx are not what was mapped", bytes, shown);
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    if (work_uses(address, bytes))
        complain("cuMemUnmap: 0x%llx is used by work that is pending", shown);
    while (bytes) {
        struct region *region = regions_find(&machine.regions, address);
        address += region->bytes;
        bytes -= region->bytes;
        unmap(region, DEAD);
    }
    return emulator_end(&call, CUDA_SUCCESS);
}

static CUresult bit_of(const struct location *location, uint64_t *bit)
{
    bool host = location->type != AT_DEVICE;
    if (!host && !device_known(location->id))
        return CUDA_ERROR_INVALID_DEVICE;
    *bit = UINT64_C(1) << (host ? HOST_BIT : location->id);
    return CUDA_SUCCESS;
}

static void set_access(struct region *region, uint64_t bit, int flags)
{
    region->readable = flags & READ ? region->readable | bit : region->readable & ~bit;
    region->writable = flags == READ_WRITE ? region->writable | bit : region->writable & ~bit;
}

/* Who may be given access, and how? A device reaches its own memory and that of its peers. */
static CUresult access_check(const struct access *wish, uint64_t address, size_t bytes)
{
    uint64_t bit = 0;
    if (wish->flags != 0 && wish->flags != READ && wish->flags != READ_WRITE)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = bit_of(&wish->location, &bit);
    if (result || wish->location.type != AT_DEVICE || !machine.no_peers)
        return result;
    for (uint64_t at = address; at < address + bytes;) {
        const struct region *region = regions_find(&machine.regions, at);
        if (region->device >= 0 && region->device != wish->location.id)
            return CUDA_ERROR_INVALID_DEVICE;
        at += region->bytes;
    }
    return CUDA_SUCCESS;
}

API cuMemSetAccess(CUdeviceptr address, size_t bytes, const struct access *list, size_t count)
{
    struct call call = CALL("cuMemSetAccess", .bytes = bytes, .address = address);
    CUresult result = CUDA_SUCCESS;
    BEGIN(call, STARTED);
    if (!list || !count)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    if (!bytes || !covered(address, bytes))
        return refuse(&call, "and what follows are not whole pieces that are mapped");
    for (size_t i = 0; i < count && !result; i++)
        result = access_check(&list[i], address, bytes);
    for (size_t i = 0; i < count && !result; i++) {
        uint64_t bit = 0;
        bit_of(&list[i].location, &bit);
        for (uint64_t at = address; at < address + bytes;) {
            struct region *region = regions_find(&machine.regions, at);
            set_access(region, bit, list[i].flags);
            at += region->bytes;
        }
    }
    return emulator_end(&call, result);
}

API cuMemGetAccess(unsigned long long *out, const struct location *location, CUdeviceptr address)
{
    struct call call = CALL("cuMemGetAccess", .address = address);
    uint64_t bit = 0;
    BEGIN(call, STARTED);
    const struct region *region = regions_find(&machine.regions, address);
    if (!out || !location || !region || region->kind != MAPPED)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    CUresult result = bit_of(location, &bit);
    if (!result)
        *out = region->writable & bit ? READ_WRITE : region->readable & bit ? READ : 0;
    return emulator_end(&call, result);
}

API cuMemRetainAllocationHandle(uint64_t *out, void *pointer)
{
    struct call call = CALL("cuMemRetainAllocationHandle", .address = NUMBER(pointer));
    BEGIN(call, STARTED);
    const struct region *region = regions_find(&machine.regions, call.address);
    if (!out || !region || region->kind != MAPPED)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    region->physical->handles++;
    *out = NUMBER(region->physical);
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuMemGetAllocationPropertiesFromHandle(struct wanted *out, uint64_t handle)
{
    struct call call = CALL("cuMemGetAllocationPropertiesFromHandle");
    struct physical *physical = NULL;
    BEGIN(call, STARTED);
    CUresult result = physical_find(&call, handle, &physical);
    if (!out || !physical)
        return emulator_end(&call, result ? result : CUDA_ERROR_INVALID_VALUE);
    memcpy(out, physical->properties, sizeof *out);
    return emulator_end(&call, CUDA_SUCCESS);
}

static off_t place_of_properties(size_t offset)
{
    return (off_t)(PROPERTIES + offset / GRANULARITY * PAGE_OF_PROPERTIES);
}

/* A descriptor whose position says where in the file the memory is; -1: it was not made for that. */
int physical_export(const struct physical *physical)
{
    struct noted noted = {.bytes = physical->bytes, .device = physical->device};
    struct wanted wanted;
    char path[32];
    memcpy(&wanted, physical->properties, sizeof wanted);
    memcpy(noted.properties, physical->properties, sizeof noted.properties);
    if (!(wanted.handle_types & DESCRIPTOR))
        return -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", physical->file);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0)
        return -2; /* too many are open */
    lseek(descriptor, (off_t)physical->offset, SEEK_SET);
    if (pwrite(descriptor, &noted, sizeof noted, place_of_properties(physical->offset)) ==
        (ssize_t)sizeof noted)
        return descriptor;
    close(descriptor);
    return -2;
}

struct physical *physical_import(int descriptor, int from)
{
    struct noted noted;
    off_t offset = lseek(descriptor, 0, SEEK_CUR);
    if (offset < 0 || from < 0 ||
        pread(from, &noted, sizeof noted, place_of_properties((size_t)offset)) !=
            (ssize_t)sizeof noted || !aligned(noted.bytes))
        return NULL;
    struct physical *physical = slab_take(&machine.physicals);
    if (!physical)
        return NULL;
    physical->device = noted.device;
    physical->bytes = noted.bytes;
    physical->offset = (size_t)offset;
    physical->file = from;
    physical->is_foreign = true;
    physical->handles = 1;
    memcpy(physical->properties, noted.properties, sizeof physical->properties);
    return physical;
}
