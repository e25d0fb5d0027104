// A driver for tests only: the calls of native/src/gpu.cpp over memfd and mprotect. Built as libcuda.so.1, and its
// hipified twin as libamdhip64.so.7. Compiled against the vendor's headers, so that every signature is the real one.
//
// Set by the environment, read at each call:
//   FAKE_GPUS=n          devices (2)
//   FAKE_VERSION=n       of the driver or the HIP runtime
//   FAKE_VMM=0           devices without virtual memory management
//   FAKE_FAIL=memMap:2   the second memMap of the process fails; names are those of the table in gpu.cpp
//   FAKE_BUGS=a,b        known faults of ROCm releases:
//       export_once      a second export gives the number of the first descriptor, open or not
//       access_needs_fd  access cannot be set once the imported descriptor is closed
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cuda.h>

#include "fake_stream.h"
#include "gpu_names.h"

namespace {

constexpr size_t GRANULARITY = 65536;
constexpr size_t DEVICE_BYTES = size_t{1} << 34;

struct Allocation {
    int memory;         // a memfd
    int exported = -1;  // the number that the first export gave
    int imported = -1;  // the number that the import was given
};

struct Range {
    size_t bytes;
    Allocation* mapped = nullptr;
};

std::mutex mutex;
std::map<Allocation*, int> allocations;  // and their references: the handle, and the mapping
std::map<uintptr_t, Range> ranges;
std::map<std::string, int> calls;
thread_local CUresult sticky = CUDA_SUCCESS;
thread_local int current = 0;
#ifndef USE_ROCM
thread_local bool has_context = false;
#endif

const char* setting(const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
}

int number(const char* name, int otherwise) {
    const char* value = setting(name);
    return *value != '\0' ? std::atoi(value) : otherwise;
}

bool bug(const char* name) { return std::strstr(setting("FAKE_BUGS"), name) != nullptr; }

// A HIP error stays with the thread until hipGetLastError.
CUresult leave(CUresult result) {
#ifdef USE_ROCM
    if (result != CUDA_SUCCESS) sticky = result;
#endif
    return result;
}

CUresult enter(const char* name) {
    std::lock_guard<std::mutex> lock(mutex);
    int count = ++calls[name];
    std::string fail = setting("FAKE_FAIL");
    if (fail == std::string(name) + ":" + std::to_string(count)) return leave(CUDA_ERROR_UNKNOWN);
    return sticky;
}

#define FAKE(name) \
    if (CUresult early = enter(#name); early != CUDA_SUCCESS) return early

bool has_device(int device) { return device >= 0 && device < number("FAKE_GPUS", 2); }

CUresult need_context() {
#ifdef USE_ROCM
    return CUDA_SUCCESS;
#else
    return has_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
#endif
}

void drop(Allocation* allocation) {
    auto found = allocations.find(allocation);
    if (--found->second > 0) return;
    close(allocation->memory);
    allocations.erase(found);
    delete allocation;
}

uintptr_t at(CUdeviceptr address) { return (uintptr_t)address; }

// The range in which an address lies.
std::map<uintptr_t, Range>::iterator around(uintptr_t address) {
    auto next = ranges.upper_bound(address);
    if (next == ranges.begin()) return ranges.end();
    --next;
    return address < next->first + next->second.bytes ? next : ranges.end();
}

// Names that hipify translates wrongly, see gpu.cpp.
#ifdef USE_ROCM
using Word = int;
#define FAKE_SET_WORDS hipMemsetD32Async
#define FAKE_STREAM_CREATE hipStreamCreateWithFlags
#else
using Word = unsigned int;
#define FAKE_SET_WORDS cuMemsetD32Async
#define FAKE_STREAM_CREATE cuStreamCreate
#endif

}  // namespace

extern "C" {

// For the tests: what is still allocated, reserved and mapped.
__attribute__((visibility("default"))) void fake_gpu_live(int* found) {
    std::lock_guard<std::mutex> lock(mutex);
    found[0] = static_cast<int>(allocations.size());
    found[1] = static_cast<int>(ranges.size());
    found[2] = 0;
    for (auto& [start, range] : ranges) found[2] += range.mapped != nullptr;
    calls.clear();
}

__attribute__((visibility("default"))) void fake_stream_busy(CUstream stream, int change) {
    reinterpret_cast<FakeStream*>(stream)->pending += change;
}

CUresult cuInit(unsigned int) {
    FAKE(init);
    return has_device(0) ? CUDA_SUCCESS : leave(CUDA_ERROR_NO_DEVICE);
}

CUresult cuDriverGetVersion(int* version) {
    FAKE(driverVersion);
    *version = number("FAKE_VERSION", 13000);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
    FAKE(deviceCount);
    *count = number("FAKE_GPUS", 2);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int index) {
    FAKE(deviceGet);
    if (!has_device(index)) return leave(CUDA_ERROR_INVALID_DEVICE);
    *device = index;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
    FAKE(deviceName);
    std::snprintf(name, static_cast<size_t>(size), "Fake GPU %d", static_cast<int>(device));
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {
    FAKE(deviceBytes);
    *bytes = DEVICE_BYTES;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
    FAKE(deviceBusId);
    std::snprintf(text, static_cast<size_t>(size), "0000:c%x:00.0", static_cast<int>(device));
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
    FAKE(deviceAttribute);
    *value = number("FAKE_VMM", 1);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
    FAKE(errorString);
    *text = error == CUDA_ERROR_UNKNOWN ? "made to fail" : "a fake error";
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t* free_bytes, size_t* bytes) {
    FAKE(memInfo);
    if (need_context() != CUDA_SUCCESS) return need_context();
    *bytes = DEVICE_BYTES;
    *free_bytes = DEVICE_BYTES / 2;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                       CUmemAllocationGranularity_flags) {
    FAKE(memGranularity);
    if (!has_device(prop->location.id)) return leave(CUDA_ERROR_INVALID_DEVICE);
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop,
                     unsigned long long) {
    FAKE(memCreate);
    bool good = has_device(prop->location.id) && bytes > 0 && bytes % GRANULARITY == 0 &&
                prop->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
                prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (!good) return leave(CUDA_ERROR_INVALID_VALUE);
    if (bytes > DEVICE_BYTES) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    int memory = static_cast<int>(syscall(SYS_memfd_create, "fake-gpu", MFD_CLOEXEC));
    if (memory < 0 || ftruncate(memory, static_cast<off_t>(bytes)) != 0) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    auto* made = new Allocation{memory};
    std::lock_guard<std::mutex> lock(mutex);
    allocations[made] = 1;
    *handle = reinterpret_cast<CUmemGenericAllocationHandle>(made);
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    FAKE(memRelease);
    std::lock_guard<std::mutex> lock(mutex);
    auto* allocation = reinterpret_cast<Allocation*>(handle);
    if (allocations.count(allocation) == 0) return leave(CUDA_ERROR_INVALID_VALUE);
    drop(allocation);
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* result, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long) {
    FAKE(memExport);
    auto* allocation = reinterpret_cast<Allocation*>(handle);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return leave(CUDA_ERROR_INVALID_VALUE);
    if (!bug("export_once") || allocation->exported < 0) allocation->exported = dup(allocation->memory);
    *static_cast<int*>(result) = allocation->exported;
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* descriptor,
                                        CUmemAllocationHandleType) {
    FAKE(memImport);
#ifdef USE_ROCM
    bool by_value = number("FAKE_VERSION", 70253211) >= 70100000;
#else
    bool by_value = true;
#endif
    // As the real one: the wrong form is a pointer that is none.
    int fd = by_value ? static_cast<int>(reinterpret_cast<uintptr_t>(descriptor)) : *static_cast<int*>(descriptor);
    int memory = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (memory < 0) return leave(CUDA_ERROR_INVALID_VALUE);
    auto* made = new Allocation{memory};
    made->imported = fd;
    std::lock_guard<std::mutex> lock(mutex);
    allocations[made] = 1;
    *handle = reinterpret_cast<CUmemGenericAllocationHandle>(made);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    FAKE(memReserve);
    void* start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    std::lock_guard<std::mutex> lock(mutex);
    ranges[reinterpret_cast<uintptr_t>(start)] = Range{bytes};
    *address = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    FAKE(memUnreserve);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = ranges.find(at(address));
    if (found == ranges.end() || found->second.bytes != bytes || found->second.mapped != nullptr)
        return leave(CUDA_ERROR_INVALID_VALUE);
    munmap(reinterpret_cast<void*>(at(address)), bytes);
    ranges.erase(found);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    FAKE(memMap);
    std::lock_guard<std::mutex> lock(mutex);
    auto* allocation = reinterpret_cast<Allocation*>(handle);
    auto found = ranges.find(at(address));
    struct stat facts{};
    if (found == ranges.end() || allocations.count(allocation) == 0 || fstat(allocation->memory, &facts) != 0 ||
        static_cast<size_t>(facts.st_size) < bytes)
        return leave(CUDA_ERROR_INVALID_VALUE);
    void* start =
        mmap(reinterpret_cast<void*>(at(address)), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->memory, 0);
    if (start == MAP_FAILED) return leave(CUDA_ERROR_INVALID_VALUE);
    found->second.mapped = allocation;
    ++allocations[allocation];
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    FAKE(memUnmap);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = ranges.find(at(address));
    if (found == ranges.end() || found->second.mapped == nullptr) return leave(CUDA_ERROR_INVALID_VALUE);
    mmap(reinterpret_cast<void*>(at(address)), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    drop(found->second.mapped);
    found->second.mapped = nullptr;
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
    FAKE(memAccess);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = ranges.find(at(address));
    if (count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || found == ranges.end() ||
        found->second.mapped == nullptr)
        return leave(CUDA_ERROR_INVALID_VALUE);
    int imported = found->second.mapped->imported;
    if (bug("access_needs_fd") && imported >= 0 && fcntl(imported, F_GETFD) < 0) return leave(CUDA_ERROR_INVALID_VALUE);
    mprotect(reinterpret_cast<void*>(at(address)), bytes, PROT_READ | PROT_WRITE);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
    FAKE(memRange);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = around(at(address));
    if (found == ranges.end() || found->second.mapped == nullptr) return leave(CUDA_ERROR_INVALID_VALUE);
    *base = (CUdeviceptr)found->first;
    *bytes = found->second.bytes;  // like HIP: no check for null
    return CUDA_SUCCESS;
}

CUresult cuMemGetHandleForAddressRange(void* result, CUdeviceptr address, size_t, CUmemRangeHandleType type,
                                       unsigned long long) {
    FAKE(rangeHandle);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = around(at(address));
    if (found == ranges.end() || found->second.mapped == nullptr || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *static_cast<int*>(result) = dup(found->second.mapped->memory);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD(CUdeviceptr target, const void* source, size_t bytes) {
    FAKE(copyIn);
    if (need_context() != CUDA_SUCCESS) return need_context();
    std::memcpy(reinterpret_cast<void*>(at(target)), source, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH(void* target, CUdeviceptr source, size_t bytes) {
    FAKE(copyOut);
    if (need_context() != CUDA_SUCCESS) return need_context();
    std::memcpy(target, reinterpret_cast<void*>(at(source)), bytes);
    return CUDA_SUCCESS;
}

CUresult FAKE_SET_WORDS(CUdeviceptr target, Word value, size_t count, CUstream) {
    FAKE(setWords);
    if (need_context() != CUDA_SUCCESS) return need_context();
    for (size_t i = 0; i < count; ++i) reinterpret_cast<Word*>(at(target))[i] = value;
    return CUDA_SUCCESS;
}

CUresult FAKE_STREAM_CREATE(CUstream* stream, unsigned int) {
    FAKE(streamCreate);
    if (need_context() != CUDA_SUCCESS) return need_context();
    *stream = reinterpret_cast<CUstream>(new FakeStream);
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
    FAKE(streamDestroy);
    reinterpret_cast<FakeStream*>(stream)->magic = 0;  // not deleted: what ends on it may come late
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream) {
    FAKE(streamQuery);
    auto* fake = reinterpret_cast<FakeStream*>(stream);
    return fake == nullptr || fake->pending == 0 ? CUDA_SUCCESS : leave(CUDA_ERROR_NOT_READY);
}

CUresult cuStreamSynchronize(CUstream) {
    FAKE(streamWait);
    return CUDA_SUCCESS;
}

#ifdef USE_ROCM
hipError_t hipRuntimeGetVersion(int* version) {
    FAKE(runtimeVersion);
    *version = number("FAKE_VERSION", 70253211);
    return hipSuccess;
}

hipError_t hipGetLastError() {
    hipError_t last = sticky;
    sticky = hipSuccess;
    return last;
}

hipError_t hipGetDevice(int* device) {
    FAKE(currentDevice);
    *device = current;
    return hipSuccess;
}

hipError_t hipSetDevice(int device) {
    FAKE(useDevice);
    if (!has_device(device)) return leave(hipErrorInvalidDevice);
    current = device;
    return hipSuccess;
}
#else
// A context is a device's number plus one.
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    FAKE(contextRetain);
    *context = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    FAKE(contextCurrent);
    *context = has_context ? reinterpret_cast<CUcontext>(static_cast<uintptr_t>(current) + 1) : nullptr;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    FAKE(contextUse);
    has_context = context != nullptr;
    current = has_context ? static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1 : 0;
    return CUDA_SUCCESS;
}
#endif
}
