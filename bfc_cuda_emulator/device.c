/* Initialisation, devices and their attributes. */
#include "emulator.h"

#include <stdio.h>
#include <string.h>

enum {
    COMPUTE_MAJOR = 75,
    COMPUTE_MINOR = 76,
    PCI_BUS = 33,
};

/* Attributes that are not zero, as a big present-day card has them. */
static const int first_attributes[][2] = {
    {1, 1024},       {2, 1024},    {3, 1024},        {4, 64},         {5, 2147483647},
    {6, 65535},      {7, 65535},   {8, 49152},       {9, 65536},      {10, 32},
    {11, 2147483647}, {12, 65536}, {13, 1980000},    {14, 512},       {15, 1},
    {16, 132},       {19, 1},      {21, 131072},     {22, 131072},    {23, 65536},
    {24, 16384},     {25, 16384},  {26, 16384},      {30, 512},       {31, 1},
    {32, 1},         {36, 2619000}, {37, 5120},      {38, 52428800},  {39, 2048},
    {40, 3},         {41, 1},      {51, 32},         {78, 1},         {79, 1},
    {80, 1},         {81, 233472}, {82, 65536},      {83, 1},         {87, 2},
    {89, 1},         {90, 1},      {91, 1},          {92, 1},         {93, 1},
    {94, 1},         {95, 1},      {97, 232448},     {98, 1},         {99, 1},
    {102, 1},        {103, 1},     {106, 32},        {107, 1},        {108, 32768000},
    {109, 134213632}, {110, 1},    {111, 1024},      {112, 1},        {113, 1},
    {114, 1},        {115, 1},     {116, 1},         {117, 1},        {118, 100},
    {119, 9},        {120, 1},     {121, 1},         {122, 1},        {123, 1},
    {124, 1},        {125, 1},     {126, 4},         {127, 1},        {129, 1},
    {131, -1},       {134, 0},     {141, 1},         {142, 1},        {144, 1},
    {145, 1},
};

bool device_known(int device)
{
    return device >= 0 && device < machine.device_count;
}

void device_reset(int index, size_t total)
{
    struct device *device = &machine.devices[index];
    if (!device->range.base)
        range_open(&device->range, (size_t)1 << 40, (UINT64_C(0x30) + (uint64_t)index) << 40, true);
    device->total = total;
    device->others = device->used = 0;
    memset(device->attributes, 0, sizeof device->attributes);
    for (size_t i = 0; i < sizeof first_attributes / sizeof *first_attributes; i++)
        device->attributes[first_attributes[i][0]] = first_attributes[i][1];
    device->attributes[COMPUTE_MAJOR] = 9;
    device->attributes[COMPUTE_MINOR] = 0;
    device->attributes[PCI_BUS] = 1 + index;
}

/* "Used by others" may be set to more than there is left. */
size_t device_free(int index)
{
    const struct device *device = &machine.devices[index];
    size_t taken = device->others + device->used;
    return taken < device->total ? device->total - taken : 0;
}

API cuInit(unsigned flags)
{
    struct call call = CALL("cuInit");
    BEGIN(call, NOTHING);
    if (flags)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    machine.wanted = true;
    machine.initialised = machine.device_count > 0;
    return emulator_end(&call, machine.device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE);
}

API cuDriverGetVersion(int *out)
{
    struct call call = CALL("cuDriverGetVersion");
    BEGIN(call, NOTHING);
    if (out)
        *out = machine.driver_version;
    return emulator_end(&call, out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

API cuDeviceGetCount(int *out)
{
    struct call call = CALL("cuDeviceGetCount");
    BEGIN(call, STARTED);
    if (out)
        *out = machine.device_count;
    return emulator_end(&call, out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

API cuDeviceGet(CUdevice *out, int ordinal)
{
    struct call call = CALL("cuDeviceGet");
    BEGIN(call, STARTED);
    if (!out)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    *out = ordinal;
    return emulator_end(&call, device_known(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE);
}

API cuDeviceGetName(char *name, int length, CUdevice device)
{
    struct call call = CALL("cuDeviceGetName");
    BEGIN(call, STARTED);
    if (!name || length <= 0)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    snprintf(name, (size_t)length, "Emulated GPU %d", device);
    return emulator_end(&call, device_known(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE);
}

API cuDeviceGetUuid_v2(unsigned char *out, CUdevice device)
{
    struct call call = CALL("cuDeviceGetUuid");
    BEGIN(call, STARTED);
    if (!out || !device_known(device))
        return emulator_end(&call, out ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE);
    memcpy(out, "emulated device", 15);
    out[15] = (unsigned char)device;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuDeviceGetLuid(char *luid, unsigned *mask, CUdevice device)
{
    struct call call = CALL("cuDeviceGetLuid");
    (void)luid, (void)mask, (void)device;
    BEGIN(call, STARTED);
    return emulator_end(&call, CUDA_ERROR_NOT_SUPPORTED);
}

API cuDeviceTotalMem_v2(size_t *out, CUdevice device)
{
    struct call call = CALL("cuDeviceTotalMem");
    BEGIN(call, STARTED);
    if (!out || !device_known(device))
        return emulator_end(&call, out ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE);
    *out = machine.devices[device].total;
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuDeviceGetAttribute(int *out, int attribute, CUdevice device)
{
    struct call call = CALL("cuDeviceGetAttribute");
    BEGIN(call, STARTED);
    if (!device_known(device))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    if (!out || attribute <= 0 || attribute >= MAX_ATTRIBUTE)
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    *out = machine.devices[device].attributes[attribute];
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    struct call call = CALL("cuDeviceComputeCapability");
    BEGIN(call, STARTED);
    if (!device_known(device))
        return emulator_end(&call, CUDA_ERROR_INVALID_DEVICE);
    *major = machine.devices[device].attributes[COMPUTE_MAJOR];
    *minor = machine.devices[device].attributes[COMPUTE_MINOR];
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuDeviceGetPCIBusId(char *out, int length, CUdevice device)
{
    struct call call = CALL("cuDeviceGetPCIBusId");
    BEGIN(call, STARTED);
    if (!out || length < 13 || !device_known(device))
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    snprintf(out, (size_t)length, "0000:%02x:00.0", 1 + device);
    return emulator_end(&call, CUDA_SUCCESS);
}

API cuDeviceGetByPCIBusId(CUdevice *out, const char *name)
{
    struct call call = CALL("cuDeviceGetByPCIBusId");
    unsigned domain = 0, bus = 0;
    BEGIN(call, STARTED);
    if (!out || !name || sscanf(name, "%x:%x", &domain, &bus) != 2 || !device_known((int)bus - 1))
        return emulator_end(&call, CUDA_ERROR_INVALID_VALUE);
    *out = (int)bus - 1;
    return emulator_end(&call, CUDA_SUCCESS);
}
