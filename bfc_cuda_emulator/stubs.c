/* Entry points that exist, since libraries look them up at their start, but do nothing. */
#include "emulator.h"

#include "symbols.h"

static CUresult unsupported(const char *name)
{
    struct call call = CALL(name);
    BEGIN(call, NOTHING);
    return emulator_end(&call, CUDA_ERROR_NOT_SUPPORTED);
}

#define S(name, since) API name(void) { return unsupported(#name); }
UNSUPPORTED(S)
