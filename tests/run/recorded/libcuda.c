/* Stands in for libcuda.so.1 where there is no GPU: keeps what the latest launch was called with.
 *
 * It has what Triton's driver links to and looks up by name. A tensor map holds the numbers that it was made of. */
#include "cuda.h"
#include <string.h>

#define MOST 256

static unsigned char record[1 << 16];
static size_t used, sizes[MOST], handles = 0x1000;
static int parameters, launches, unloaded;

static void put(const void *from, size_t bytes) {
  memcpy(record + used, from, bytes);
  used += bytes;
}

/* The sizes in bytes of the next launches' parameters; forgets the latest launch. */
void expect(int count, const size_t *bytes) {
  memcpy(sizes, bytes, count * sizeof *bytes);
  parameters = count;
  launches = 0;
  used = 0;
}

int launched(void) { return launches; }
int unloads(void) { return unloaded; }

size_t recorded(void *into) {
  memcpy(into, record, used);
  return used;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **given, void **extra) {
  unsigned shape[] = {config->gridDimX,  config->gridDimY,  config->gridDimZ,       config->blockDimX,
                      config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->numAttrs};
  launches++;
  used = 0;
  put(shape, sizeof shape);
  put(&config->hStream, sizeof config->hStream);
  put(&function, sizeof function);
  for (unsigned i = 0; i < config->numAttrs; i++) {
    put(&config->attrs[i].id, sizeof config->attrs[i].id);
    put(&config->attrs[i].value, 12); /* a cluster's three sizes; the rest is not initialised */
  }
  for (int i = 0; i < parameters; i++)
    put(given[i], sizes[i]);
  return extra ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned char kinds[] = {type, rank, interleave, swizzle, promotion, fill}, *at = (unsigned char *)map;
  memset(map, 0, sizeof *map);
  memcpy(at, &address, 8), at += 8;
  memcpy(at, kinds, sizeof kinds), at += 8;
  for (unsigned i = 0; i < rank; i++) {
    unsigned small[] = {shape[i], i + 1 < rank ? strides[i] : 0, box[i], steps[i]};
    memcpy(at, small, sizeof small), at += sizeof small;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)(handles += 16);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)((size_t)module + 1);
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
  unloaded++;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 1;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

static CUresult one(void *into) {
  *(size_t *)into = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { return one(context); }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return one(context); }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return one(value); }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return *status = 0, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "of the stand-in", CUDA_SUCCESS; }
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
