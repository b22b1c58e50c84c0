/* A sub-allocator's calls for callers that must not take the GIL. PyTorch calls an allocator with its own mutex held, and
 * frees tensors with the GIL held and that mutex wanted: whoever takes the GIL in between waits for ever. A sub-allocator
 * offers them as a capsule (SubAllocator.native). Every function may be called from any thread, and holds no lock across a
 * call to a driver. */
#pragma once

#include <stdint.h>

#define BFC_NATIVE_SOURCE "bfc.NativeSource"

typedef struct {
    void* self;
    /* As SubAllocator.alloc: 0 and a block of at least nbytes, BFC_NO_ROOM, or another number: it failed. */
    int (*alloc)(void* self, uint64_t alignment, uint64_t nbytes, uint64_t* address, uint64_t* received);
    /* As SubAllocator.free; 0, or a number: the block is still live. */
    int (*free)(void* self, uint64_t address, uint64_t nbytes);
    /* As SubAllocator.order; 0, or a number. */
    int (*order)(void* self, uint64_t first, uint64_t then);
    /* As SubAllocator.stream_id; 0, or a number. */
    int (*stream_id)(void* self, uint64_t stream, uint64_t* id);
    /* Waits for all work on the device; 0, or a number. */
    int (*synchronize)(void* self);
} bfc_native_source;

#define BFC_NO_ROOM 2 /* CUDA_ERROR_OUT_OF_MEMORY */
