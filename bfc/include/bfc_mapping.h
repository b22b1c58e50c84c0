/* A sub-allocator's calls that map memory, as C functions in a capsule (SubAllocator.native_mapping). An allocator makes
 * these calls with the GIL free, and without a Python object. No function may ask for the GIL. Each may be called from any
 * thread. It returns 0, or another number if it has done nothing; then `fault` says what went wrong. */
#ifndef BFC_MAPPING_H
#define BFC_MAPPING_H

#include <stddef.h>
#include <stdint.h>

#define BFC_NATIVE_MAPPING "bfc.NativeMapping" /* the capsule's name */
#define BFC_NO_ROOM 2 /* there is no memory for a page, or there are no addresses left */

/* What a function has failed with, for `raise_error`. It comes as all zeros. */
typedef struct {
    int call; /* which call of the system or the driver, as the source numbers them */
    int result; /* and what that has returned */
    uint64_t address; /* what it was about */
    uint64_t nbytes;
    int undoing; /* of `map`: what unmapping the first pages again has failed with, or 0 */
    uint64_t lost; /* and the bytes that are still mapped, from the address on that `map` was given */
} bfc_mapping_fault;

typedef struct {
    void* self;
    /* Like SubAllocator.reserve. BFC_NO_ROOM: there are not so many addresses left. */
    int (*reserve)(void* self, uint64_t nbytes, uint64_t* address, bfc_mapping_fault* fault);
    /* Like SubAllocator.unreserve. */
    int (*unreserve)(void* self, uint64_t address, uint64_t nbytes, bfc_mapping_fault* fault);
    /* Like SubAllocator.create. BFC_NO_ROOM: there is no memory for a page. */
    int (*create)(void* self, uint64_t nbytes, uint64_t* page, bfc_mapping_fault* fault);
    /* Like SubAllocator.release. */
    int (*release)(void* self, uint64_t page, bfc_mapping_fault* fault);
    /* Like SubAllocator.map. */
    int (*map)(void* self, uint64_t address, const uint64_t* pages, size_t count, bfc_mapping_fault* fault);
    /* Like SubAllocator.set_access. */
    int (*set_access)(void* self, uint64_t address, uint64_t nbytes, bfc_mapping_fault* fault);
    /* Like SubAllocator.unmap. */
    int (*unmap)(void* self, uint64_t address, uint64_t nbytes, bfc_mapping_fault* fault);
    /* Called with the GIL: sets Python's exception for a fault, and returns -1. NULL: a SubAllocatorError is raised that
     * names the call and the number. */
    int (*raise_error)(void* self, const bfc_mapping_fault* fault);
} bfc_native_mapping;

#endif
