// The calls of cuBLAS and cuBLASLt that PyTorch makes, for the emulated driver.
//
// NVIDIA's libraries refuse every driver but NVIDIA's. A product computes nothing here: it takes its
// place on its stream, or in its graph, as a kernel does. Memory is what matters: the workspaces are
// PyTorch's own, which hands them over. Compiled twice, once for each library: see `torch_runtime.py`.
#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

namespace {
[[maybe_unused]] cublasStatus_t launch(cudaStream_t stream) {
    static const int product = 0;
    const cudaError_t error = cudaLaunchKernel(&product, dim3(1), dim3(1), nullptr, 0, stream);
    return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}
}  // namespace

#ifdef LT
// -- cuBLASLt ---------------------------------------------------------------------------------------

namespace {
template <class Opaque>
cublasStatus_t make(Opaque** out) {
    *out = new Opaque();
    return CUBLAS_STATUS_SUCCESS;
}
template <class Opaque>
cublasStatus_t drop(Opaque* given) {
    delete given;
    return CUBLAS_STATUS_SUCCESS;
}
}  // namespace

API size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t, cudaDataType_t) {
    return make(out);
}
API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t given) { return drop(given); }
API cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void*,
                                                  size_t) {
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType, uint64_t, uint64_t, int64_t) {
    return make(out);
}
API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t given) { return drop(given); }
API cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
                                                    const void*, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) { return make(out); }
API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t given) { return drop(given); }
API cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                        cublasLtMatmulPreferenceAttributes_t, const void*, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int asked,
                                                  cublasLtMatmulHeuristicResult_t* out, int* found) {
    *found = asked > 0;
    if (*found) std::memset(out, 0, sizeof *out);
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                                  cublasLtMatrixLayout_t, const void*, cublasLtMatrixLayout_t, const void*,
                                  const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t,
                                  const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
    return launch(stream);
}

#else
// -- cuBLAS -----------------------------------------------------------------------------------------

struct cublasContext {
    cudaStream_t stream;
    cublasMath_t math;
    cublasPointerMode_t pointers;
};

API cublasStatus_t cublasCreate_v2(cublasHandle_t* out) {
    *out = new cublasContext();
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasDestroy_v2(cublasHandle_t given) {
    delete given;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
API cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) { return CUBLAS_STATUS_SUCCESS; }
API cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    handle->math = mode;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* out) {
    *out = handle->math;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
    handle->pointers = mode;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* out) {
    *out = handle->pointers;
    return CUBLAS_STATUS_SUCCESS;
}
// Whatever else PyTorch calls is a product, by names that end in _v2, Ex or Batched: all take the handle first.
API cublasStatus_t torch_product(cublasHandle_t handle) { return launch(handle->stream); }
#endif
