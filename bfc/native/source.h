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
} bfc_native_source;

#define BFC_NO_ROOM 2 /* CUDA_ERROR_OUT_OF_MEMORY */
