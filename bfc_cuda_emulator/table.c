/* cuGetProcAddress: which function serves a name for a program built against some version. */
#include "emulator.h"

#include <string.h>

#include "symbols.h"

typedef void (*function)(void);

struct entry {
    const char *name;
    int since;
    function plain, per_thread;
};

#define E(name, since, symbol) extern CUresult symbol();
#define P(name, since, symbol, twin) extern CUresult symbol(); extern CUresult twin();
#define S(name, since) extern CUresult name();
EMULATED(E, P)
UNSUPPORTED(S)
#undef E
#undef P
#undef S

#define E(name, since, symbol) {#name, since, (function)symbol, NULL},
#define P(name, since, symbol, twin) {#name, since, (function)symbol, (function)twin},
#define S(name, since) {#name, since, (function)name, NULL},
static const struct entry table[] = {EMULATED(E, P) UNSUPPORTED(S)};

enum { PER_THREAD_DEFAULT_STREAM = 2, FOUND = 0, MISSING = 1, TOO_NEW = 2 };

API cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    const struct entry *best = NULL;
    bool known = false;
    if (machine.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!name || !out)
        return CUDA_ERROR_INVALID_VALUE;
    machine_start();
    machine_lock();
    *out = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table && !name_hidden(name); i++) {
        const struct entry *entry = &table[i];
        if (strcmp(entry->name, name) || entry->since > machine.newest_known)
            continue;
        known = true;
        if (entry->since <= version && (!best || entry->since > best->since))
            best = entry;
    }
    machine_unlock();
    if (status)
        *status = best ? FOUND : known ? TOO_NEW : MISSING;
    if (!best)
        return CUDA_ERROR_NOT_FOUND;
    function chosen = (flags & PER_THREAD_DEFAULT_STREAM) && best->per_thread ? best->per_thread
                                                                              : best->plain;
    memcpy(out, &chosen, sizeof chosen);
    return CUDA_SUCCESS;
}

API cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
