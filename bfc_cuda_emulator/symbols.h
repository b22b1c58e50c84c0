/* Every name that cuGetProcAddress knows, with the version of CUDA that first had it so. */
#ifndef SYMBOLS_H
#define SYMBOLS_H

#define EMULATED(E, P) \
    E(cuCtxCreate, 3020, cuCtxCreate_v2) \
    E(cuCtxCreate, 12050, cuCtxCreate_v4) \
    E(cuCtxDestroy, 4000, cuCtxDestroy_v2) \
    E(cuCtxDisablePeerAccess, 4000, cuCtxDisablePeerAccess) \
    E(cuCtxEnablePeerAccess, 4000, cuCtxEnablePeerAccess) \
    E(cuCtxGetApiVersion, 3020, cuCtxGetApiVersion) \
    E(cuCtxGetCurrent, 4000, cuCtxGetCurrent) \
    E(cuCtxGetDevice, 2000, cuCtxGetDevice) \
    E(cuCtxGetDevice, 13000, cuCtxGetDevice_v2) \
    E(cuCtxGetFlags, 7000, cuCtxGetFlags) \
    E(cuCtxGetId, 12000, cuCtxGetId) \
    E(cuCtxGetLimit, 3010, cuCtxGetLimit) \
    E(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange) \
    E(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2) \
    E(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2) \
    E(cuCtxSetCurrent, 4000, cuCtxSetCurrent) \
    E(cuCtxSetFlags, 12010, cuCtxSetFlags) \
    E(cuCtxSetLimit, 3010, cuCtxSetLimit) \
    E(cuCtxSynchronize, 2000, cuCtxSynchronize) \
    E(cuCtxSynchronize, 13000, cuCtxSynchronize_v2) \
    E(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer) \
    E(cuDeviceComputeCapability, 2000, cuDeviceComputeCapability) \
    E(cuDeviceGet, 2000, cuDeviceGet) \
    E(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute) \
    E(cuDeviceGetByPCIBusId, 4010, cuDeviceGetByPCIBusId) \
    E(cuDeviceGetCount, 2000, cuDeviceGetCount) \
    E(cuDeviceGetDefaultMemPool, 11020, cuDeviceGetDefaultMemPool) \
    E(cuDeviceGetLuid, 10000, cuDeviceGetLuid) \
    E(cuDeviceGetMemPool, 11020, cuDeviceGetMemPool) \
    E(cuDeviceGetName, 2000, cuDeviceGetName) \
    E(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId) \
    E(cuDeviceGetUuid, 9020, cuDeviceGetUuid_v2) \
    E(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2) \
    E(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState) \
    E(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease_v2) \
    E(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2) \
    E(cuDevicePrimaryCtxReset, 7000, cuDevicePrimaryCtxReset_v2) \
    E(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2) \
    E(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain) \
    E(cuDevicePrimaryCtxSetFlags, 7000, cuDevicePrimaryCtxSetFlags_v2) \
    E(cuDevicePrimaryCtxSetFlags, 11000, cuDevicePrimaryCtxSetFlags_v2) \
    E(cuDeviceSetMemPool, 11020, cuDeviceSetMemPool) \
    E(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2) \
    E(cuDriverGetVersion, 2020, cuDriverGetVersion) \
    E(cuEventCreate, 2000, cuEventCreate) \
    E(cuEventDestroy, 4000, cuEventDestroy_v2) \
    E(cuEventElapsedTime, 2000, cuEventElapsedTime) \
    E(cuEventQuery, 2000, cuEventQuery) \
    P(cuEventRecord, 2000, cuEventRecord, cuEventRecord_ptsz) \
    P(cuEventRecordWithFlags, 11010, cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz) \
    E(cuEventSynchronize, 2000, cuEventSynchronize) \
    E(cuGetErrorName, 6000, cuGetErrorName) \
    E(cuGetErrorString, 6000, cuGetErrorString) \
    E(cuGetProcAddress, 11030, cuGetProcAddress) \
    E(cuGetProcAddress, 12000, cuGetProcAddress_v2) \
    E(cuGraphDestroy, 10000, cuGraphDestroy) \
    E(cuGraphExecDestroy, 10000, cuGraphExecDestroy) \
    E(cuGraphExecGetFlags, 12000, cuGraphExecGetFlags) \
    E(cuGraphExecUpdate, 12000, cuGraphExecUpdate_v2) \
    E(cuGraphGetEdges, 10000, cuGraphGetEdges) \
    E(cuGraphGetEdges, 12030, cuGraphGetEdges_v2) \
    E(cuGraphGetNodes, 10000, cuGraphGetNodes) \
    E(cuGraphGetRootNodes, 10000, cuGraphGetRootNodes) \
    E(cuGraphInstantiate, 11000, cuGraphInstantiate_v2) \
    E(cuGraphInstantiate, 12000, cuGraphInstantiateWithFlags) \
    E(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags) \
    E(cuGraphInstantiateWithParams, 12000, cuGraphInstantiateWithParams) \
    P(cuGraphLaunch, 10000, cuGraphLaunch, cuGraphLaunch_ptsz) \
    E(cuGraphNodeGetDependencies, 10000, cuGraphNodeGetDependencies) \
    E(cuGraphNodeGetDependencies, 12030, cuGraphNodeGetDependencies_v2) \
    E(cuGraphNodeGetDependentNodes, 10000, cuGraphNodeGetDependentNodes) \
    E(cuGraphNodeGetDependentNodes, 12030, cuGraphNodeGetDependentNodes_v2) \
    E(cuGraphNodeGetType, 10000, cuGraphNodeGetType) \
    E(cuGraphReleaseUserObject, 11030, cuGraphReleaseUserObject) \
    E(cuGraphRetainUserObject, 11030, cuGraphRetainUserObject) \
    P(cuGraphUpload, 11010, cuGraphUpload, cuGraphUpload_ptsz) \
    E(cuInit, 2000, cuInit) \
    E(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle) \
    E(cuIpcGetEventHandle, 4010, cuIpcGetEventHandle) \
    E(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle) \
    E(cuIpcOpenEventHandle, 4010, cuIpcOpenEventHandle) \
    E(cuIpcOpenMemHandle, 4010, cuIpcOpenMemHandle) \
    E(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2) \
    E(cuFuncGetAttribute, 2020, cuFuncGetAttribute) \
    E(cuFuncSetAttribute, 9000, cuFuncSetAttribute) \
    E(cuFuncSetCacheConfig, 3000, cuFuncSetCacheConfig) \
    E(cuKernelGetFunction, 12000, cuKernelGetFunction) \
    P(cuLaunchHostFunc, 10000, cuLaunchHostFunc, cuLaunchHostFunc_ptsz) \
    P(cuLaunchKernel, 4000, cuLaunchKernel, cuLaunchKernel_ptsz) \
    E(cuLibraryGetKernel, 12000, cuLibraryGetKernel) \
    E(cuLibraryLoadData, 12000, cuLibraryLoadData) \
    E(cuLibraryUnload, 12000, cuLibraryUnload) \
    E(cuMemAddressFree, 10020, cuMemAddressFree) \
    E(cuMemAddressReserve, 10020, cuMemAddressReserve) \
    E(cuMemAdvise, 8000, cuMemAdvise) \
    E(cuMemAdvise, 12020, cuMemAdvise_v2) \
    E(cuMemAlloc, 3020, cuMemAlloc_v2) \
    P(cuMemAllocAsync, 11020, cuMemAllocAsync, cuMemAllocAsync_ptsz) \
    P(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz) \
    E(cuMemAllocHost, 3020, cuMemAllocHost_v2) \
    E(cuMemAllocManaged, 6000, cuMemAllocManaged) \
    E(cuMemAllocPitch, 3020, cuMemAllocPitch_v2) \
    E(cuMemCreate, 10020, cuMemCreate) \
    E(cuMemExportToShareableHandle, 10020, cuMemExportToShareableHandle) \
    E(cuMemFree, 3020, cuMemFree_v2) \
    P(cuMemFreeAsync, 11020, cuMemFreeAsync, cuMemFreeAsync_ptsz) \
    E(cuMemFreeHost, 2000, cuMemFreeHost) \
    E(cuMemGetAccess, 10020, cuMemGetAccess) \
    E(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2) \
    E(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity) \
    E(cuMemGetAllocationPropertiesFromHandle, 10020, cuMemGetAllocationPropertiesFromHandle) \
    E(cuMemGetDefaultMemPool, 13000, cuMemGetDefaultMemPool) \
    E(cuMemGetInfo, 3020, cuMemGetInfo_v2) \
    E(cuMemGetMemPool, 13000, cuMemGetMemPool) \
    E(cuMemHostAlloc, 2020, cuMemHostAlloc) \
    E(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2) \
    E(cuMemHostGetFlags, 2030, cuMemHostGetFlags) \
    E(cuMemHostRegister, 6050, cuMemHostRegister_v2) \
    E(cuMemHostUnregister, 4000, cuMemHostUnregister) \
    E(cuMemImportFromShareableHandle, 10020, cuMemImportFromShareableHandle) \
    E(cuMemMap, 10020, cuMemMap) \
    E(cuMemPoolCreate, 11020, cuMemPoolCreate) \
    E(cuMemPoolDestroy, 11020, cuMemPoolDestroy) \
    E(cuMemPoolGetAccess, 11020, cuMemPoolGetAccess) \
    E(cuMemPoolGetAttribute, 11020, cuMemPoolGetAttribute) \
    E(cuMemPoolSetAccess, 11020, cuMemPoolSetAccess) \
    E(cuMemPoolSetAttribute, 11020, cuMemPoolSetAttribute) \
    E(cuMemPoolTrimTo, 11020, cuMemPoolTrimTo) \
    E(cuMemPrefetchAsync, 8000, cuMemPrefetchAsync) \
    E(cuMemPrefetchAsync, 12020, cuMemPrefetchAsync_v2) \
    E(cuMemRangeGetAttribute, 8000, cuMemRangeGetAttribute) \
    E(cuMemRelease, 10020, cuMemRelease) \
    E(cuMemRetainAllocationHandle, 11000, cuMemRetainAllocationHandle) \
    E(cuMemSetAccess, 10020, cuMemSetAccess) \
    E(cuMemUnmap, 10020, cuMemUnmap) \
    P(cuMemcpy, 4000, cuMemcpy, cuMemcpy_ptds) \
    P(cuMemcpy2DAsync, 3020, cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz) \
    P(cuMemcpy3DAsync, 3020, cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz) \
    P(cuMemcpyAsync, 4000, cuMemcpyAsync, cuMemcpyAsync_ptsz) \
    P(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds) \
    P(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz) \
    P(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds) \
    P(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz) \
    P(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds) \
    P(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz) \
    P(cuMemcpyPeer, 4000, cuMemcpyPeer, cuMemcpyPeer_ptds) \
    P(cuMemcpyPeerAsync, 4000, cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz) \
    P(cuMemsetD16, 3020, cuMemsetD16_v2, cuMemsetD16_v2_ptds) \
    P(cuMemsetD16Async, 3020, cuMemsetD16Async, cuMemsetD16Async_ptsz) \
    P(cuMemsetD32, 3020, cuMemsetD32_v2, cuMemsetD32_v2_ptds) \
    P(cuMemsetD32Async, 3020, cuMemsetD32Async, cuMemsetD32Async_ptsz) \
    P(cuMemsetD8, 3020, cuMemsetD8_v2, cuMemsetD8_v2_ptds) \
    P(cuMemsetD8Async, 3020, cuMemsetD8Async, cuMemsetD8Async_ptsz) \
    E(cuModuleGetFunction, 2000, cuModuleGetFunction) \
    E(cuModuleLoad, 2000, cuModuleLoad) \
    E(cuModuleLoadData, 2000, cuModuleLoadData) \
    E(cuModuleLoadDataEx, 2010, cuModuleLoadDataEx) \
    E(cuModuleUnload, 2000, cuModuleUnload) \
    E(cuPointerGetAttribute, 4000, cuPointerGetAttribute) \
    E(cuPointerGetAttributes, 7000, cuPointerGetAttributes) \
    E(cuPointerSetAttribute, 6000, cuPointerSetAttribute) \
    P(cuStreamAddCallback, 5000, cuStreamAddCallback, cuStreamAddCallback_ptsz) \
    E(cuStreamAttachMemAsync, 6000, cuStreamAttachMemAsync) \
    P(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz) \
    E(cuStreamCreate, 2000, cuStreamCreate) \
    E(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority) \
    E(cuStreamDestroy, 4000, cuStreamDestroy_v2) \
    P(cuStreamEndCapture, 10000, cuStreamEndCapture, cuStreamEndCapture_ptsz) \
    P(cuStreamGetCaptureInfo, 11030, cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz) \
    P(cuStreamGetCaptureInfo, 12030, cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz) \
    P(cuStreamGetCtx, 9020, cuStreamGetCtx, cuStreamGetCtx_ptsz) \
    P(cuStreamGetCtx, 12050, cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz) \
    P(cuStreamGetDevice, 12080, cuStreamGetDevice, cuStreamGetDevice_ptsz) \
    P(cuStreamGetFlags, 5050, cuStreamGetFlags, cuStreamGetFlags_ptsz) \
    P(cuStreamGetId, 12000, cuStreamGetId, cuStreamGetId_ptsz) \
    P(cuStreamGetPriority, 5050, cuStreamGetPriority, cuStreamGetPriority_ptsz) \
    P(cuStreamIsCapturing, 10000, cuStreamIsCapturing, cuStreamIsCapturing_ptsz) \
    P(cuStreamQuery, 2000, cuStreamQuery, cuStreamQuery_ptsz) \
    P(cuStreamSynchronize, 2000, cuStreamSynchronize, cuStreamSynchronize_ptsz) \
    E(cuStreamUpdateCaptureDependencies, 11030, cuStreamUpdateCaptureDependencies) \
    E(cuStreamUpdateCaptureDependencies, 12030, cuStreamUpdateCaptureDependencies_v2) \
    P(cuStreamWaitEvent, 3020, cuStreamWaitEvent, cuStreamWaitEvent_ptsz) \
    E(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode) \
    E(cuUserObjectCreate, 11030, cuUserObjectCreate) \
    E(cuUserObjectRelease, 11030, cuUserObjectRelease) \
    E(cuUserObjectRetain, 11030, cuUserObjectRetain)

#define UNSUPPORTED(S) \
    S(cuArray3DCreate, 2000) S(cuArray3DGetDescriptor, 2000) S(cuArrayCreate, 2000) \
    S(cuArrayDestroy, 2000) S(cuArrayGetDescriptor, 2000) \
    S(cuArrayGetMemoryRequirements, 11060) S(cuArrayGetPlane, 11020) \
    S(cuArrayGetSparseProperties, 11010) S(cuCheckpointProcessCheckpoint, 12080) \
    S(cuCheckpointProcessGetRestoreThreadId, 12080) S(cuCheckpointProcessGetState, 12080) \
    S(cuCheckpointProcessLock, 12080) S(cuCheckpointProcessRestore, 12080) \
    S(cuCheckpointProcessUnlock, 12080) S(cuCoredumpGetAttribute, 12010) \
    S(cuCoredumpGetAttributeGlobal, 12010) S(cuCoredumpSetAttribute, 12010) \
    S(cuCoredumpSetAttributeGlobal, 12010) S(cuCtxAttach, 2000) S(cuCtxDetach, 2000) \
    S(cuCtxFromGreenCtx, 12040) S(cuCtxGetCacheConfig, 3020) S(cuCtxGetDevResource, 12040) \
    S(cuCtxGetExecAffinity, 11040) S(cuCtxGetSharedMemConfig, 4020) S(cuCtxRecordEvent, 12050) \
    S(cuCtxResetPersistingL2Cache, 11000) S(cuCtxSetCacheConfig, 3020) \
    S(cuCtxSetSharedMemConfig, 4020) S(cuCtxWaitEvent, 12050) S(cuDestroyExternalMemory, 10000) \
    S(cuDestroyExternalSemaphore, 10000) S(cuDevResourceGenerateDesc, 12040) \
    S(cuDevSmResourceSplitByCount, 12040) S(cuDeviceGetDevResource, 12040) \
    S(cuDeviceGetExecAffinitySupport, 11040) S(cuDeviceGetGraphMemAttribute, 11040) \
    S(cuDeviceGetHostAtomicCapabilities, 13000) S(cuDeviceGetNvSciSyncAttributes, 10020) \
    S(cuDeviceGetP2PAtomicCapabilities, 13000) S(cuDeviceGetP2PAttribute, 8000) \
    S(cuDeviceGetProperties, 2000) S(cuDeviceGetTexture1DLinearMaxWidth, 11010) \
    S(cuDeviceGraphMemTrim, 11040) S(cuDeviceRegisterAsyncNotification, 12040) \
    S(cuDeviceSetGraphMemAttribute, 11040) S(cuDeviceUnregisterAsyncNotification, 12040) \
    S(cuExternalMemoryGetMappedBuffer, 10000) S(cuExternalMemoryGetMappedMipmappedArray, 10000) \
    S(cuFlushGPUDirectRDMAWrites, 11030) S(cuFuncGetModule, 11000) \
    S(cuFuncGetName, 12030) S(cuFuncGetParamInfo, 12040) S(cuFuncIsLoaded, 12040) \
    S(cuFuncLoad, 12040) S(cuFuncSetBlockShape, 2000) \
    S(cuFuncSetSharedMemConfig, 4020) \
    S(cuFuncSetSharedSize, 2000) S(cuGetExportTable, 3000) S(cuGraphAddBatchMemOpNode, 11070) \
    S(cuGraphAddChildGraphNode, 10000) S(cuGraphAddDependencies, 10000) \
    S(cuGraphAddEmptyNode, 10000) S(cuGraphAddEventRecordNode, 11010) \
    S(cuGraphAddEventWaitNode, 11010) S(cuGraphAddExternalSemaphoresSignalNode, 11020) \
    S(cuGraphAddExternalSemaphoresWaitNode, 11020) S(cuGraphAddHostNode, 10000) \
    S(cuGraphAddKernelNode, 10000) S(cuGraphAddMemAllocNode, 11040) \
    S(cuGraphAddMemFreeNode, 11040) S(cuGraphAddMemcpyNode, 10000) \
    S(cuGraphAddMemsetNode, 10000) S(cuGraphAddNode, 12020) \
    S(cuGraphBatchMemOpNodeGetParams, 11070) S(cuGraphBatchMemOpNodeSetParams, 11070) \
    S(cuGraphChildGraphNodeGetGraph, 10000) S(cuGraphClone, 10000) \
    S(cuGraphConditionalHandleCreate, 12030) S(cuGraphCreate, 10000) \
    S(cuGraphDebugDotPrint, 11030) S(cuGraphDestroyNode, 10000) \
    S(cuGraphEventRecordNodeGetEvent, 11010) S(cuGraphEventRecordNodeSetEvent, 11010) \
    S(cuGraphEventWaitNodeGetEvent, 11010) S(cuGraphEventWaitNodeSetEvent, 11010) \
    S(cuGraphExecBatchMemOpNodeSetParams, 11070) S(cuGraphExecChildGraphNodeSetParams, 11010) \
    S(cuGraphExecEventRecordNodeSetEvent, 11010) \
    S(cuGraphExecEventWaitNodeSetEvent, 11010) \
    S(cuGraphExecExternalSemaphoresSignalNodeSetParams, 11020) \
    S(cuGraphExecExternalSemaphoresWaitNodeSetParams, 11020) \
    S(cuGraphExecHostNodeSetParams, 10020) S(cuGraphExecKernelNodeSetParams, 10010) \
    S(cuGraphExecMemcpyNodeSetParams, 10020) S(cuGraphExecMemsetNodeSetParams, 10020) \
    S(cuGraphExecNodeSetParams, 12020) \
    S(cuGraphExternalSemaphoresSignalNodeGetParams, 11020) \
    S(cuGraphExternalSemaphoresSignalNodeSetParams, 11020) \
    S(cuGraphExternalSemaphoresWaitNodeGetParams, 11020) \
    S(cuGraphExternalSemaphoresWaitNodeSetParams, 11020) \
    S(cuGraphHostNodeGetParams, 10000) \
    S(cuGraphHostNodeSetParams, 10000) \
    S(cuGraphKernelNodeCopyAttributes, 11000) S(cuGraphKernelNodeGetAttribute, 11000) \
    S(cuGraphKernelNodeGetParams, 10000) S(cuGraphKernelNodeSetAttribute, 11000) \
    S(cuGraphKernelNodeSetParams, 10000) \
    S(cuGraphMemAllocNodeGetParams, 11040) S(cuGraphMemFreeNodeGetParams, 11040) \
    S(cuGraphMemcpyNodeGetParams, 10000) S(cuGraphMemcpyNodeSetParams, 10000) \
    S(cuGraphMemsetNodeGetParams, 10000) S(cuGraphMemsetNodeSetParams, 10000) \
    S(cuGraphNodeFindInClone, 10000) \
    S(cuGraphNodeGetEnabled, 11060) \
    S(cuGraphNodeSetEnabled, 11060) S(cuGraphNodeSetParams, 12020) \
    S(cuGraphRemoveDependencies, 10000) \
    S(cuGraphicsMapResources, 3000) \
    S(cuGraphicsResourceGetMappedMipmappedArray, 5000) \
    S(cuGraphicsResourceGetMappedPointer, 3000) S(cuGraphicsResourceSetMapFlags, 3000) \
    S(cuGraphicsSubResourceGetMappedArray, 3000) S(cuGraphicsUnmapResources, 3000) \
    S(cuGraphicsUnregisterResource, 3000) S(cuGreenCtxCreate, 12040) \
    S(cuGreenCtxDestroy, 12040) S(cuGreenCtxGetDevResource, 12040) S(cuGreenCtxGetId, 12090) \
    S(cuGreenCtxRecordEvent, 12040) S(cuGreenCtxStreamCreate, 12050) \
    S(cuGreenCtxWaitEvent, 12040) S(cuImportExternalMemory, 10000) \
    S(cuImportExternalSemaphore, 10000) \
    S(cuKernelGetAttribute, 12000) S(cuKernelGetLibrary, 12050) \
    S(cuKernelGetName, 12030) S(cuKernelGetParamInfo, 12040) S(cuKernelSetAttribute, 12000) \
    S(cuKernelSetCacheConfig, 12000) S(cuLaunch, 2000) S(cuLaunchCooperativeKernel, 9000) \
    S(cuLaunchCooperativeKernelMultiDevice, 9000) S(cuLaunchGrid, 2000) \
    S(cuLaunchGridAsync, 2000) S(cuLaunchKernelEx, 11060) \
    S(cuLibraryEnumerateKernels, 12040) S(cuLibraryGetGlobal, 12000) \
    S(cuLibraryGetKernelCount, 12040) \
    S(cuLibraryGetManaged, 12000) S(cuLibraryGetModule, 12000) \
    S(cuLibraryGetUnifiedFunction, 12000) \
    S(cuLibraryLoadFromFile, 12000) S(cuLinkAddData, 5050) \
    S(cuLinkAddFile, 5050) S(cuLinkComplete, 5050) S(cuLinkCreate, 5050) S(cuLinkDestroy, 5050) \
    S(cuLogsCurrent, 12090) S(cuLogsDumpToFile, 12090) S(cuLogsDumpToMemory, 12090) \
    S(cuLogsRegisterCallback, 12090) S(cuLogsUnregisterCallback, 12090) \
    S(cuMemBatchDecompressAsync, 12060) S(cuMemDiscardAndPrefetchBatchAsync, 13000) \
    S(cuMemDiscardBatchAsync, 13000) \
    S(cuMemGetHandleForAddressRange, 11070) \
    S(cuMemMapArrayAsync, 11010) S(cuMemPoolExportPointer, 11020) \
    S(cuMemPoolExportToShareableHandle, 11020) S(cuMemPoolImportFromShareableHandle, 11020) \
    S(cuMemPoolImportPointer, 11020) S(cuMemPrefetchBatchAsync, 13000) \
    S(cuMemRangeGetAttributes, 8000) S(cuMemSetMemPool, 13000) S(cuMemcpy2D, 2000) \
    S(cuMemcpy2DUnaligned, 2000) S(cuMemcpy3D, 2000) \
    S(cuMemcpy3DBatchAsync, 12080) S(cuMemcpy3DPeer, 4000) \
    S(cuMemcpy3DPeerAsync, 4000) S(cuMemcpyAtoA, 2000) S(cuMemcpyAtoD, 2000) \
    S(cuMemcpyAtoH, 2000) S(cuMemcpyAtoHAsync, 2000) S(cuMemcpyBatchAsync, 12080) \
    S(cuMemcpyDtoA, 2000) S(cuMemcpyHtoA, 2000) S(cuMemcpyHtoAAsync, 2000) \
    S(cuMemsetD2D16, 2000) S(cuMemsetD2D16Async, 3020) S(cuMemsetD2D32, 2000) \
    S(cuMemsetD2D32Async, 3020) S(cuMemsetD2D8, 2000) S(cuMemsetD2D8Async, 3020) \
    S(cuMipmappedArrayCreate, 5000) S(cuMipmappedArrayDestroy, 5000) \
    S(cuMipmappedArrayGetLevel, 5000) S(cuMipmappedArrayGetMemoryRequirements, 11060) \
    S(cuMipmappedArrayGetSparseProperties, 11010) S(cuModuleEnumerateFunctions, 12040) \
    S(cuModuleGetFunctionCount, 12040) S(cuModuleGetGlobal, 2000) \
    S(cuModuleGetLoadingMode, 11070) S(cuModuleGetSurfRef, 3000) S(cuModuleGetTexRef, 2000) \
    S(cuModuleLoadFatBinary, 2000) S(cuMulticastAddDevice, 12010) \
    S(cuMulticastBindAddr, 12010) S(cuMulticastBindMem, 12010) S(cuMulticastCreate, 12010) \
    S(cuMulticastGetGranularity, 12010) S(cuMulticastUnbind, 12010) \
    S(cuOccupancyAvailableDynamicSMemPerBlock, 10020) \
    S(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050) \
    S(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 7000) \
    S(cuOccupancyMaxActiveClusters, 11070) S(cuOccupancyMaxPotentialBlockSize, 6050) \
    S(cuOccupancyMaxPotentialBlockSizeWithFlags, 7000) \
    S(cuOccupancyMaxPotentialClusterSize, 11070) S(cuParamSetSize, 2000) \
    S(cuParamSetTexRef, 2000) S(cuParamSetf, 2000) S(cuParamSeti, 2000) S(cuParamSetv, 2000) \
    S(cuProfilerInitialize, 4000) S(cuProfilerStart, 4000) S(cuProfilerStop, 4000) \
    S(cuSignalExternalSemaphoresAsync, 10000) S(cuStreamBatchMemOp, 8000) \
    S(cuStreamBeginCaptureToGraph, 12030) S(cuStreamCopyAttributes, 11000) \
    S(cuStreamGetAttribute, 11000) S(cuStreamGetGreenCtx, 12040) S(cuStreamSetAttribute, 11000) \
    S(cuStreamWaitValue32, 8000) \
    S(cuStreamWaitValue64, 9000) S(cuStreamWriteValue32, 8000) S(cuStreamWriteValue64, 9000) \
    S(cuSurfObjectCreate, 5000) S(cuSurfObjectDestroy, 5000) \
    S(cuSurfObjectGetResourceDesc, 5000) S(cuSurfRefGetArray, 3000) S(cuSurfRefSetArray, 3000) \
    S(cuTensorMapEncodeIm2col, 12000) S(cuTensorMapEncodeIm2colWide, 12080) \
    S(cuTensorMapEncodeTiled, 12000) S(cuTensorMapReplaceAddress, 12000) \
    S(cuTexObjectCreate, 5000) S(cuTexObjectDestroy, 5000) S(cuTexObjectGetResourceDesc, 5000) \
    S(cuTexObjectGetResourceViewDesc, 5000) S(cuTexObjectGetTextureDesc, 5000) \
    S(cuTexRefCreate, 2000) S(cuTexRefDestroy, 2000) S(cuTexRefGetAddress, 2000) \
    S(cuTexRefGetAddressMode, 2000) S(cuTexRefGetArray, 2000) S(cuTexRefGetBorderColor, 8000) \
    S(cuTexRefGetFilterMode, 2000) S(cuTexRefGetFlags, 2000) S(cuTexRefGetFormat, 2000) \
    S(cuTexRefGetMaxAnisotropy, 5000) S(cuTexRefGetMipmapFilterMode, 5000) \
    S(cuTexRefGetMipmapLevelBias, 5000) S(cuTexRefGetMipmapLevelClamp, 5000) \
    S(cuTexRefGetMipmappedArray, 5000) S(cuTexRefSetAddress, 2000) \
    S(cuTexRefSetAddress2D, 2020) S(cuTexRefSetAddressMode, 2000) S(cuTexRefSetArray, 2000) \
    S(cuTexRefSetBorderColor, 8000) S(cuTexRefSetFilterMode, 2000) S(cuTexRefSetFlags, 2000) \
    S(cuTexRefSetFormat, 2000) S(cuTexRefSetMaxAnisotropy, 5000) \
    S(cuTexRefSetMipmapFilterMode, 5000) S(cuTexRefSetMipmapLevelBias, 5000) \
    S(cuTexRefSetMipmapLevelClamp, 5000) S(cuTexRefSetMipmappedArray, 5000) \
    S(cuWaitExternalSemaphoresAsync, 10000)

#endif
