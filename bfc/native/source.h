/* A sub-allocator's calls for callers that must not take the GIL, in a capsule (SubAllocator.native). PyTorch asks a
 * MemPool for segments while it holds its own mutex, and frees tensors while it holds the GIL and waits for that mutex:
 * to take the GIL would be a deadlock. Every function may be called from any thread, and holds no lock
 * while it calls the driver. */
#pragma once

#include <stdint.h>

#define BFC_NATIVE_SOURCE "bfc.NativeSource"

typedef struct {
    void* self;
    /* Like SubAllocator.alloc: 0 and a block of at least nbytes, BFC_NO_ROOM, or another number if it failed. */
    int (*alloc)(void* self, uint64_t alignment, uint64_t nbytes, uint64_t* address, uint64_t* received);
    /* Like SubAllocator.free: 0, or another number if the block is still live. */
    int (*free)(void* self, uint64_t address, uint64_t nbytes);
    /* Like SubAllocator.order: 0, or another number if it failed. */
    int (*order)(void* self, uint64_t first, uint64_t then);
    /* Like SubAllocator.stream_id: 0, or another number if it failed. */
    int (*stream_id)(void* self, uint64_t stream, uint64_t* id);
    /* Waits for all work on the device: 0, or another number if it failed. */
    int (*synchronize)(void* self);
    /* Like SubAllocator.fence: 0 and an event behind all that is queued on a stream, or NULL where nothing is to be
     * waited for; or another number if it failed. */
    int (*mark)(void* self, uint64_t stream, void** event);
    /* Like Fence.done, or Fence.wait: 0 if the stream has reached the event, BFC_NOT_REACHED, or another number if it
     * failed. The event becomes NULL if it went with its context. One thread at a time asks an event. */
    int (*reached)(void* self, void** event, int waits);
    /* Takes an event back that is not needed any more. NULL does nothing. */
    void (*drop)(void* self, void* event);
} bfc_native_source;

#define BFC_NO_ROOM 2       /* CUDA_ERROR_OUT_OF_MEMORY */
#define BFC_NOT_REACHED 600 /* CUDA_ERROR_NOT_READY */
