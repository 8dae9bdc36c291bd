/* A GPU on paper: what torch's CUDA build asks of libcudart, libcuda and cuBLAS, answered without a device.

Kernels and library products do nothing; copies and memsets are done; memory is host memory that takes no room before
it is touched; all streams are in order and over at once. So torch's own caching allocator, its counters, events and
hooks run as on a device of PAPER_GPU_GIB, and nothing that is computed means anything.
*/
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define MIB ((size_t)1 << 20)
#define CONTEXT_BYTES (500 * MIB)
#define MOST_BLOCKS 65536
#define PIECE_BYTES (32 * (size_t)MIB)
#define SPACE_BYTES ((size_t)1 << 42)
#define MOST_DEVICES 16

enum kind { DEVICE, HOST };
struct block { char *start; size_t size; enum kind kind; int device; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block blocks[MOST_BLOCKS];
static size_t num_blocks, used_bytes[MOST_DEVICES];
static __thread int current_device;
static __thread cudaError_t last_error;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

static size_t total_bytes(void) {
    const char *gib = getenv("PAPER_GPU_GIB");
    return (gib ? strtoull(gib, NULL, 10) : 80) << 30;
}
static int capability(void) {
    const char *text = getenv("PAPER_GPU_CAPABILITY");
    return text ? atoi(text) : 80;
}

/* ---- memory ---- */
static void note_block(void *start, size_t size, enum kind kind, int device) {
    pthread_mutex_lock(&lock);
    if (num_blocks == MOST_BLOCKS) abort();
    blocks[num_blocks++] = (struct block){start, size, kind, device};
    pthread_mutex_unlock(&lock);
}
static size_t drop_block(void *start) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_blocks; i++)
        if (blocks[i].start == (char *)start) {
            size = blocks[i].size;
            if (blocks[i].kind == DEVICE) used_bytes[blocks[i].device] -= size;
            blocks[i] = blocks[--num_blocks];
            break;
        }
    pthread_mutex_unlock(&lock);
    return size;
}
static struct block find_block(const void *pointer) {
    struct block found = {0};
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_blocks; i++)
        if ((char *)pointer >= blocks[i].start && (char *)pointer < blocks[i].start + blocks[i].size) found = blocks[i];
    pthread_mutex_unlock(&lock);
    return found;
}
static void *map(size_t size, int protection) {
    void *start = mmap(NULL, size + 2 * MIB, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    size_t skip = (2 * MIB - ((size_t)start & (2 * MIB - 1))) & (2 * MIB - 1);
    if (skip) munmap(start, skip);
    munmap((char *)start + skip + size, 2 * MIB - skip);
    return (char *)start + skip;
}
/* As an H200's driver (580.159) gives address space: in pieces of 32 MiB, each new one below those before, and what is
   left of a piece to what fits there. No place is given twice. */
static char *lowest;
static struct { char *start; size_t size; } rests[MOST_BLOCKS];
static size_t num_rests;
static void *device_place(size_t size) {
    char *place = NULL;
    pthread_mutex_lock(&lock);
    if (!lowest) {
        lowest = mmap(NULL, SPACE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (lowest == MAP_FAILED) abort();
        lowest = (char *)((size_t)(lowest + SPACE_BYTES) & ~(PIECE_BYTES - 1));
    }
    for (size_t i = 0; i < num_rests && !place; i++)
        if (rests[i].size >= size) {
            place = rests[i].start;
            rests[i].start += size;
            rests[i].size -= size;
        }
    if (!place) {
        size_t piece = (size + PIECE_BYTES - 1) & ~(PIECE_BYTES - 1);
        place = lowest -= piece;
        if (piece > size && num_rests < MOST_BLOCKS) {
            rests[num_rests].start = place + size;
            rests[num_rests++].size = piece - size;
        }
    }
    pthread_mutex_unlock(&lock);
    return mmap(place, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
static size_t pages(size_t size) { return (size + 4095) & ~(size_t)4095; }
static int take_bytes(size_t size, int device) {
    pthread_mutex_lock(&lock);
    int fits = used_bytes[device] + size + CONTEXT_BYTES <= total_bytes();
    if (fits) used_bytes[device] += size;
    pthread_mutex_unlock(&lock);
    return fits;
}
cudaError_t cudaMalloc(void **pointer, size_t size) {
    /* A device gives memory in pieces of 2 MiB. */
    size = (size + 2 * MIB - 1) & ~(2 * MIB - 1);
    *pointer = NULL;
    if (!take_bytes(size, current_device)) return fail(cudaErrorMemoryAllocation);
    *pointer = device_place(size);
    note_block(*pointer, size, DEVICE, current_device);
    return 0;
}
cudaError_t cudaFree(void *pointer) {
    size_t size = pointer ? drop_block(pointer) : 0;
    if (size) munmap(pointer, size);
    return 0;
}
cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t s) { return cudaMalloc(p, size); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    size = pages(size ? size : 1);
    *pointer = map(size, PROT_READ | PROT_WRITE);
    note_block(*pointer, size, HOST, 0);
    return 0;
}
cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) { note_block(pointer, size, HOST, 0); return 0; }
cudaError_t cudaHostUnregister(void *pointer) { drop_block(pointer); return 0; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = total_bytes();
    *free = *total - used_bytes[current_device] - CONTEXT_BYTES;
    return 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    struct block block = find_block(pointer);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = !block.start ? cudaMemoryTypeUnregistered : block.kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = block.device;
    attributes->devicePointer = block.start ? (void *)pointer : NULL;
    attributes->hostPointer = block.start && block.kind == HOST ? (void *)pointer : NULL;
    return 0;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind k, cudaStream_t s) {
    memmove(to, from, size);
    return 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind k) { memmove(to, from, size); return 0; }
cudaError_t cudaMemcpyPeerAsync(void *to, int d, const void *from, int e, size_t size, cudaStream_t s) {
    memmove(to, from, size);
    return 0;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind k, cudaStream_t s) {
    for (size_t row = 0; row < height; row++) memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return 0;
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t o, enum cudaMemcpyKind k) { return 0; }
cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t s) { memset(at, value, size); return 0; }
cudaError_t cudaMemset(void *at, int value, size_t size) { memset(at, value, size); return 0; }
cudaError_t cudaGetSymbolAddress(void **at, const void *symbol) {
    static char symbols[4096];
    *at = symbols;
    return 0;
}

/* ---- device ---- */
static int num_devices(void) {
    const char *count = getenv("PAPER_GPU_COUNT");
    int number = count ? atoi(count) : 1;
    return number < 1 ? 1 : number > MOST_DEVICES ? MOST_DEVICES : number;
}
cudaError_t cudaGetDeviceCount(int *count) { *count = num_devices(); return 0; }
cudaError_t cudaGetDevice(int *device) { *device = current_device; return 0; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
    current_device = device;
    return 0;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    const char *name = getenv("PAPER_GPU_NAME");
    snprintf(p->name, sizeof p->name, "%s", name ? name : "Paper GPU");
    memset(&p->uuid, 0x50 + device, sizeof p->uuid);
    p->totalGlobalMem = total_bytes();
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 163 << 10;
    p->sharedMemPerMultiprocessor = 164 << 10;
    p->reservedSharedMemPerBlock = 1 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->memPitch = 0x7fffffff;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = capability() / 10;
    p->minor = capability() % 10;
    p->textureAlignment = 512;
    p->multiProcessorCount = 108;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = 1;
    p->asyncEngineCount = 3;
    p->memoryBusWidth = 5120;
    p->l2CacheSize = 40 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->streamPrioritiesSupported = 1;
    p->hostRegisterSupported = p->memoryPoolsSupported = 1;
    return 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp p;
    cudaGetDeviceProperties(&p, device);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrClockRate: *value = 1410000; break;
    case cudaDevAttrMemoryClockRate: *value = 1215000; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrTextureAlignment: *value = 512; break;
    default: *value = 1;
    }
    return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) { snprintf(text, size, "0000:00:00.0"); return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
cudaError_t cudaDeviceSynchronize(void) { return 0; }
cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = 0; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(cudaError_t error) { return error == 2 ? "out of memory" : error ? "an error on paper" : "no error"; }
const char *cudaGetErrorName(cudaError_t error) { return error == 2 ? "cudaErrorMemoryAllocation" : error ? "cudaErrorOnPaper" : "cudaSuccess"; }

/* ---- streams and events ---- */
static cudaError_t new_handle(void **handle) { *handle = calloc(1, 64); return 0; }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return new_handle((void **)s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return new_handle((void **)s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { return new_handle((void **)s); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { free(s); return 0; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return 0; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return 0; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return 0; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) { *status = cudaStreamCaptureStatusNone; return 0; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *g,
                                     const cudaGraphNode_t **d, const cudaGraphEdgeData **ed, size_t *n) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return 0;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return 0; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *data) { call(data); return 0; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *data, unsigned f) { call(s, 0, data); return 0; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return new_handle((void **)e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return new_handle((void **)e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return 0; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { clock_gettime(CLOCK_MONOTONIC, (struct timespec *)e); return 0; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) { return 0; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return 0; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    struct timespec *a = (struct timespec *)from, *b = (struct timespec *)to;
    *ms = (b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) / 1e6;
    return 0;
}

/* ---- kernels ---- */
static void *no_module;
void **__cudaRegisterFatBinary(void *binary) { return &no_module; }
void __cudaRegisterFatBinaryEnd(void **module) {}
void __cudaUnregisterFatBinary(void **module) {}
void __cudaRegisterFunction(void **m, const char *f, char *d, const char *n, int l, void *a, void *b, void *c, void *e, int *w) {}
void __cudaRegisterVar(void **m, char *v, char *d, const char *n, int e, size_t s, int c, int g) {}
char __cudaInitModule(void **module) { return 1; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = *block = (dim3){1, 1, 1};
    *shared = 0;
    *(void **)stream = NULL;
    return 0;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return 0; }
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) { return 0; }
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) { return 0; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return 0; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = capability();
    attributes->maxDynamicSharedSizeBytes = 48 << 10;
    return 0;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int s, size_t d, unsigned g) { *n = 2; return 0; }

/* ---- the driver, of which torch asks for what expandable segments need ---- */
static CUresult no_driver(void) { return CUDA_ERROR_NOT_SUPPORTED; }
static CUresult driver_ok(void) { return 0; }
static CUresult get_context(CUcontext *context) { *context = (CUcontext)&no_module; return 0; }
static CUresult device_get(CUdevice *device, int ordinal) { *device = ordinal; return 0; }
static CUresult device_attribute(int *value, CUdevice_attribute a, CUdevice d) { *value = 1; return 0; }
static CUresult reserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long f) {
    *at = (CUdeviceptr)map(size, PROT_NONE);
    return *at ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}
static CUresult address_free(CUdeviceptr at, size_t size) { munmap((void *)at, size); return 0; }
struct piece { size_t size; int device; };
static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *p, unsigned long long f) {
    int device = p->location.id;
    if (!take_bytes(size, device)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct piece *kept = malloc(sizeof *kept);
    *kept = (struct piece){size, device};
    *handle = (CUmemGenericAllocationHandle)kept;
    return 0;
}
static CUresult release(CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&lock);
    struct piece *piece = (struct piece *)handle;
    used_bytes[piece->device] -= piece->size;
    pthread_mutex_unlock(&lock);
    free((void *)handle);
    return 0;
}
static CUresult mem_map(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle h, unsigned long long f) {
    mprotect((void *)at, size, PROT_READ | PROT_WRITE);
    note_block((void *)at, size, DEVICE, ((struct piece *)h)->device);
    return 0;
}
static CUresult mem_unmap(CUdeviceptr at, size_t size) {
    int device = find_block((void *)at).device;
    size_t dropped = drop_block((void *)at);
    pthread_mutex_lock(&lock);
    used_bytes[device] += dropped; /* its handle gives it back */
    pthread_mutex_unlock(&lock);
    madvise((void *)at, size, MADV_DONTNEED);
    return 0;
}
static CUresult granularity(size_t *size, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) { *size = 2 * MIB; return 0; }
static CUresult address_range(CUdeviceptr *base, size_t *size, CUdeviceptr at) {
    struct block block = find_block((void *)at);
    if (!block.start) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = (CUdeviceptr)block.start;
    if (size) *size = block.size;
    return 0;
}
static CUresult primary_state(CUdevice d, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
static CUresult error_string(CUresult error, const char **text) { *text = "an error on paper"; return 0; }

static const struct { const char *name; void *call; } driver[] = {
    {"cuCtxGetCurrent", get_context}, {"cuCtxSetCurrent", driver_ok}, {"cuDeviceGet", device_get},
    {"cuDeviceGetAttribute", device_attribute}, {"cuMemAddressReserve", reserve}, {"cuMemAddressFree", address_free},
    {"cuMemCreate", create}, {"cuMemRelease", release}, {"cuMemMap", mem_map}, {"cuMemUnmap", mem_unmap},
    {"cuMemSetAccess", driver_ok}, {"cuMemGetAllocationGranularity", granularity},
    {"cuMemGetAddressRange", address_range}, {"cuDevicePrimaryCtxGetState", primary_state},
    {"cuGetErrorString", error_string},
};
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **call, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    *call = no_driver;
    for (size_t i = 0; i < sizeof driver / sizeof *driver; i++)
        if (!strcmp(symbol, driver[i].name)) *call = driver[i].call;
    if (status) *status = cudaDriverEntryPointSuccess;
    return 0;
}

/* ---- libraries: products that do nothing ---- */
int cublasCreate_v2(void **handle) { return new_handle(handle); }
int cublasGetMathMode(void *h, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; return 0; }
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **d, int c, int s) { return new_handle(d); }
int cublasLtMatrixLayoutCreate(void **d, int t, unsigned long long r, unsigned long long c, long long l) { return new_handle(d); }
int cublasLtMatmulPreferenceCreate(void **p) { return new_handle(p); }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int asked, void *results, int *given) {
    /* cublasLtMatmulHeuristicResult_t: eight words of algorithm, workspace, state, waves, four reserved */
    memset(results, 0, 8 * 8 + 8 + 4 + 4 + 4 * 4);
    *given = 1;
    return 0;
}
int cuptiSubscribe(void **subscriber, void *call, void *data) { return new_handle(subscriber); }
int cuptiGetVersion(unsigned *version) { *version = 130000; return 0; }
int cuptiGetResultString(int result, const char **text) { *text = "on paper"; return 0; }
int cuptiGetCallbackName(int domain, unsigned id, const char **text) { *text = "on paper"; return 0; }
int cuptiActivityGetNextRecord(void *b, size_t s, void **r) { return 12; /* CUPTI_ERROR_MAX_LIMIT_REACHED: no more */ }
int cuptiActivityGetNumDroppedRecords(void *c, unsigned s, size_t *n) { *n = 0; return 0; }
