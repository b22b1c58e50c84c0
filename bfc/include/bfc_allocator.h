/* An allocator of bfc as a table of C functions, for callers that cannot use Python.
 *
 * Python makes the table: `bfc.integrations.torch_backend.capsule(pools)` returns it in a PyCapsule
 * named BFC_ALLOCATOR_CAPSULE. It lives as long as the capsule, and longer if `retain` was called.
 *
 * Any thread may call any function, with the GIL or without. A request that a free block serves takes
 * no GIL, and neither does an ordinary free; for a CachingAllocator over CUDA memory, nor do
 * record_stream and the free of what other streams use. A call that needs Python takes the GIL, with no
 * lock of bfc held: the caller must not hold a lock that a thread with the GIL may wait for.
 *
 * Functions that can fail write why into `why`, a text of at most `room` bytes that ends with a zero
 * byte. No exception leaves them.
 */
#ifndef BFC_ALLOCATOR_H
#define BFC_ALLOCATOR_H

#include <stddef.h>
#include <stdint.h>

/* Increased when the meaning of a field changes. New fields are added at the end; `size` says whether they exist. */
#define BFC_ALLOCATOR_VERSION 1
#define BFC_ALLOCATOR_CAPSULE "bfc.allocator"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    BFC_OK = 0,
    BFC_OUT_OF_MEMORY = 1,
    BFC_NOT_LIVE = 2,       /* the address is not that of a live allocation */
    BFC_FAILED = 3,         /* the device failed, an argument is wrong, or the pool is closed */
} bfc_result;

typedef struct {
    int64_t current, peak, allocated, freed;
} bfc_stat;

/* PyTorch's counters, of all memory, of the small pool and of the large pool. */
typedef struct {
    bfc_stat allocation[3], segment[3], active[3], inactive_split[3];
    bfc_stat allocated_bytes[3], reserved_bytes[3], active_bytes[3], inactive_split_bytes[3], requested_bytes[3];
    bfc_stat oversize_allocations, oversize_segments;
    int64_t num_alloc_retries, num_ooms, num_sync_all_streams, num_device_alloc, num_device_free, max_split_size;
    int64_t invalid_frees;  /* of addresses that were not live, on any device */
} bfc_device_stats;

/* A live allocation, and the pool that it is in. */
typedef struct {
    int device;             /* -1: no live allocation begins at the address, and nothing else is set */
    int64_t allocation_id;  /* counted from 1 on in each pool, also in its history and its snapshots */
    uint64_t size, requested_size;
    int64_t stream;
    uint64_t bytes_in_use, bytes_reserved;  /* of the pool */
    uint64_t changes;       /* how often memory has come to the pool or gone: of segments, and of pages */
} bfc_block;

typedef struct bfc_allocator {
    uint32_t version;       /* BFC_ALLOCATOR_VERSION */
    uint32_t size;          /* of this structure, in bytes */
    void *self;             /* the first argument of every function */

    /* Allocates `nbytes` bytes on a device, for use on a stream: its handle, or 0 for the default stream. */
    bfc_result (*allocate)(void *self, int device, size_t nbytes, int64_t stream, void **ptr, char *why, size_t room);
    /* Frees an allocation of any device. An address that is not live is counted, and a warning says so. While the
     * interpreter exits, and in a forked child, it does nothing. */
    bfc_result (*free)(void *self, void *ptr);
    /* Another stream uses the memory: after the free it is reused only when that stream has finished. */
    bfc_result (*record_stream)(void *self, void *ptr, int64_t stream, char *why, size_t room);
    /* Copies between two allocations of one device, and waits until that is done. */
    bfc_result (*copy)(void *self, void *to, const void *from, size_t nbytes, int64_t stream, char *why, size_t room);
    /* Gives free memory back to the driver, on all devices. */
    bfc_result (*empty)(void *self, char *why, size_t room);
    bfc_result (*stats)(void *self, int device, bfc_device_stats *stats, char *why, size_t room);
    bfc_result (*reset_accumulated_stats)(void *self, int device, char *why, size_t room);
    bfc_result (*reset_peak_stats)(void *self, int device, char *why, size_t room);
    /* The free bytes and the total bytes of a device, as far as its sub-allocator knows. */
    bfc_result (*memory_info)(void *self, int device, size_t *free, size_t *total, char *why, size_t room);
    /* The device whose pool an address lies in, whether in a live allocation or not; -1 for other memory. */
    int (*device_of)(void *self, const void *ptr);

    /* `retain` keeps the table and its pools alive beyond the capsule; `release` ends that. */
    void (*retain)(void *self);
    void (*release)(void *self);

    /* Like `allocate`, from the private pool of an id, two numbers, whatever scope is open. */
    bfc_result (*allocate_in_pool)(void *self, int device, size_t nbytes, int64_t stream, uint64_t first, uint64_t second,
                                   void **ptr, char *why, size_t room);
    /* What is known of a live allocation. Takes no GIL. */
    void (*look)(void *self, const void *ptr, bfc_block *block);
    /* From now on `current(device)` is asked for a device's current stream in the calling thread: whether that captures a
     * graph decides how a call is dealt with while a capture is marked. Call it once, before all others, with the GIL. */
    void (*follow_streams)(void *self, int64_t (*current)(int device));
} bfc_allocator;

#ifdef __cplusplus
}
#endif
#endif
