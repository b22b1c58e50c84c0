/* The entry points for programs whose default stream is that of their thread: there stream 0 means
 * the per-thread one. cuGetProcAddress gives these out when it is asked for them. */
#include "emulator.h"

static CUstream mine(CUstream stream)
{
    return stream ? stream : PER_THREAD_STREAM;
}

#define FORWARD(entry, parameters, ...) \
    extern CUresult entry parameters; \
    API entry##_ptsz parameters { return entry(__VA_ARGS__); }

FORWARD(cuStreamQuery, (CUstream s), mine(s))
FORWARD(cuStreamSynchronize, (CUstream s), mine(s))
FORWARD(cuStreamWaitEvent, (CUstream s, CUevent e, unsigned f), mine(s), e, f)
FORWARD(cuStreamGetId, (CUstream s, unsigned long long *out), mine(s), out)
FORWARD(cuStreamGetCtx, (CUstream s, CUcontext *out), mine(s), out)
FORWARD(cuStreamGetCtx_v2, (CUstream s, CUcontext *out, void **g), mine(s), out, g)
FORWARD(cuStreamGetDevice, (CUstream s, CUdevice *out), mine(s), out)
FORWARD(cuStreamGetFlags, (CUstream s, unsigned *out), mine(s), out)
FORWARD(cuStreamGetPriority, (CUstream s, int *out), mine(s), out)
FORWARD(cuStreamIsCapturing, (CUstream s, int *out), mine(s), out)
FORWARD(cuStreamBeginCapture_v2, (CUstream s, int mode), mine(s), mode)
FORWARD(cuStreamEndCapture, (CUstream s, CUgraph *graph), mine(s), graph)
FORWARD(cuGraphLaunch, (CUgraphExec e, CUstream s), e, mine(s))
FORWARD(cuGraphUpload, (CUgraphExec e, CUstream s), e, mine(s))
FORWARD(cuStreamGetCaptureInfo_v2,
        (CUstream s, int *o, uint64_t *i, CUgraph *g, const CUgraphNode **n, size_t *c),
        mine(s), o, i, g, n, c)
FORWARD(cuStreamGetCaptureInfo_v3,
        (CUstream s, int *o, uint64_t *i, CUgraph *g, const CUgraphNode **n, const struct edge **e,
         size_t *c),
        mine(s), o, i, g, n, e, c)
FORWARD(cuLaunchHostFunc, (CUstream s, CUhostFn f, void *a), mine(s), f, a)
FORWARD(cuStreamAddCallback, (CUstream s, CUstreamCallback f, void *a, unsigned n),
        mine(s), f, a, n)
FORWARD(cuEventRecord, (CUevent e, CUstream s), e, mine(s))
FORWARD(cuEventRecordWithFlags, (CUevent e, CUstream s, unsigned f), e, mine(s), f)
FORWARD(cuMemAllocAsync, (CUdeviceptr *out, size_t n, CUstream s), out, n, mine(s))
FORWARD(cuMemAllocFromPoolAsync, (CUdeviceptr *out, size_t n, CUmemoryPool p, CUstream s),
        out, n, p, mine(s))
FORWARD(cuMemFreeAsync, (CUdeviceptr p, CUstream s), p, mine(s))
FORWARD(cuMemcpyAsync, (CUdeviceptr t, CUdeviceptr f, size_t n, CUstream s), t, f, n, mine(s))
FORWARD(cuMemcpyPeerAsync,
        (CUdeviceptr t, CUcontext a, CUdeviceptr f, CUcontext b, size_t n, CUstream s),
        t, a, f, b, n, mine(s))
FORWARD(cuMemcpyHtoDAsync_v2, (CUdeviceptr t, const void *f, size_t n, CUstream s),
        t, f, n, mine(s))
FORWARD(cuMemcpyDtoHAsync_v2, (void *t, CUdeviceptr f, size_t n, CUstream s), t, f, n, mine(s))
FORWARD(cuMemcpyDtoDAsync_v2, (CUdeviceptr t, CUdeviceptr f, size_t n, CUstream s),
        t, f, n, mine(s))
FORWARD(cuMemsetD8Async, (CUdeviceptr t, unsigned char v, size_t n, CUstream s), t, v, n, mine(s))
FORWARD(cuMemsetD16Async, (CUdeviceptr t, unsigned short v, size_t n, CUstream s), t, v, n, mine(s))
FORWARD(cuMemsetD32Async, (CUdeviceptr t, unsigned v, size_t n, CUstream s), t, v, n, mine(s))

FORWARD(cuMemcpy2DAsync_v2, (const void *c, CUstream s), c, mine(s))
FORWARD(cuMemcpy3DAsync_v2, (const void *c, CUstream s), c, mine(s))
FORWARD(cuLaunchKernel,
        (const void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
         unsigned n, CUstream s, void **p, void **e),
        f, x, y, z, a, b, c, n, mine(s), p, e)

/* What has no stream among its arguments runs on the default one all the same. */
API cuMemcpy_ptds(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy_any("cuMemcpy", to, from, bytes, PER_THREAD_STREAM, true);
}

API cuMemcpyPeer_ptds(CUdeviceptr to, CUcontext one, CUdeviceptr from, CUcontext other,
                      size_t bytes)
{
    (void)one, (void)other;
    return copy_over("cuMemcpyPeer", to, from, bytes, PER_THREAD_STREAM);
}

API cuMemcpyHtoD_v2_ptds(CUdeviceptr to, const void *from, size_t bytes)
{
    return copy_in("cuMemcpyHtoD", to, from, bytes, PER_THREAD_STREAM, true);
}

API cuMemcpyDtoH_v2_ptds(void *to, CUdeviceptr from, size_t bytes)
{
    return copy_out("cuMemcpyDtoH", to, from, bytes, PER_THREAD_STREAM, true);
}

API cuMemcpyDtoD_v2_ptds(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy_over("cuMemcpyDtoD", to, from, bytes, PER_THREAD_STREAM);
}

API cuMemsetD8_v2_ptds(CUdeviceptr to, unsigned char value, size_t count)
{
    return copy_fill("cuMemsetD8", to, value, 1, count, PER_THREAD_STREAM);
}

API cuMemsetD16_v2_ptds(CUdeviceptr to, unsigned short value, size_t count)
{
    return copy_fill("cuMemsetD16", to, value, 2, count, PER_THREAD_STREAM);
}

API cuMemsetD32_v2_ptds(CUdeviceptr to, unsigned value, size_t count)
{
    return copy_fill("cuMemsetD32", to, value, 4, count, PER_THREAD_STREAM);
}
