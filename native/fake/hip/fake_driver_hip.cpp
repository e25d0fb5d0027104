// Made by scripts/hipify from native/fake/fake_driver.cpp. Edit that, then run it again.
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

#include <hip/hip_runtime.h>

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
thread_local hipError_t sticky = hipSuccess;
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
hipError_t leave(hipError_t result) {
#ifdef USE_ROCM
    if (result != hipSuccess) sticky = result;
#endif
    return result;
}

hipError_t enter(const char* name) {
    std::lock_guard<std::mutex> lock(mutex);
    int count = ++calls[name];
    std::string fail = setting("FAKE_FAIL");
    if (fail == std::string(name) + ":" + std::to_string(count)) return leave(hipErrorUnknown);
    return sticky;
}

#define FAKE(name) \
    if (hipError_t early = enter(#name); early != hipSuccess) return early

bool has_device(int device) { return device >= 0 && device < number("FAKE_GPUS", 2); }

hipError_t need_context() {
#ifdef USE_ROCM
    return hipSuccess;
#else
    return has_context ? hipSuccess : hipErrorInvalidContext;
#endif
}

void drop(Allocation* allocation) {
    auto found = allocations.find(allocation);
    if (--found->second > 0) return;
    close(allocation->memory);
    allocations.erase(found);
    delete allocation;
}

uintptr_t at(hipDeviceptr_t address) { return (uintptr_t)address; }

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
#define FAKE_SET_WORDS hipMemsetAsync
#define FAKE_STREAM_CREATE hipStreamCreate__
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

__attribute__((visibility("default"))) void fake_stream_busy(hipStream_t stream, int change) {
    reinterpret_cast<FakeStream*>(stream)->pending += change;
}

hipError_t hipInit(unsigned int) {
    FAKE(init);
    return has_device(0) ? hipSuccess : leave(hipErrorNoDevice);
}

hipError_t hipDriverGetVersion(int* version) {
    FAKE(driverVersion);
    *version = number("FAKE_VERSION", 13000);
    return hipSuccess;
}

hipError_t hipGetDeviceCount(int* count) {
    FAKE(deviceCount);
    *count = number("FAKE_GPUS", 2);
    return hipSuccess;
}

hipError_t hipDeviceGet(hipDevice_t* device, int index) {
    FAKE(deviceGet);
    if (!has_device(index)) return leave(hipErrorInvalidDevice);
    *device = index;
    return hipSuccess;
}

hipError_t hipDeviceGetName(char* name, int size, hipDevice_t device) {
    FAKE(deviceName);
    std::snprintf(name, static_cast<size_t>(size), "Fake GPU %d", static_cast<int>(device));
    return hipSuccess;
}

hipError_t cuDeviceTotalMem(size_t* bytes, hipDevice_t) {
    FAKE(deviceBytes);
    *bytes = DEVICE_BYTES;
    return hipSuccess;
}

hipError_t hipDeviceGetPCIBusId(char* text, int size, hipDevice_t device) {
    FAKE(deviceBusId);
    std::snprintf(text, static_cast<size_t>(size), "0000:c%x:00.0", static_cast<int>(device));
    return hipSuccess;
}

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t, hipDevice_t) {
    FAKE(deviceAttribute);
    *value = number("FAKE_VMM", 1);
    return hipSuccess;
}

hipError_t hipDrvGetErrorString(hipError_t error, const char** text) {
    FAKE(errorString);
    *text = error == hipErrorUnknown ? "made to fail" : "a fake error";
    return hipSuccess;
}

hipError_t hipMemGetInfo(size_t* free_bytes, size_t* bytes) {
    FAKE(memInfo);
    if (need_context() != hipSuccess) return need_context();
    *bytes = DEVICE_BYTES;
    *free_bytes = DEVICE_BYTES / 2;
    return hipSuccess;
}

hipError_t hipMemGetAllocationGranularity(size_t* granularity, const hipMemAllocationProp* prop,
                                       hipMemAllocationGranularity_flags) {
    FAKE(memGranularity);
    if (!has_device(prop->location.id)) return leave(hipErrorInvalidDevice);
    *granularity = GRANULARITY;
    return hipSuccess;
}

hipError_t hipMemCreate(hipMemGenericAllocationHandle_t* handle, size_t bytes, const hipMemAllocationProp* prop,
                     unsigned long long) {
    FAKE(memCreate);
    bool good = has_device(prop->location.id) && bytes > 0 && bytes % GRANULARITY == 0 &&
                prop->type == hipMemAllocationTypePinned &&
                prop->requestedHandleTypes == hipMemHandleTypePosixFileDescriptor;
    if (!good) return leave(hipErrorInvalidValue);
    if (bytes > DEVICE_BYTES) return leave(hipErrorMemoryAllocation);
    int memory = static_cast<int>(syscall(SYS_memfd_create, "fake-gpu", MFD_CLOEXEC));
    if (memory < 0 || ftruncate(memory, static_cast<off_t>(bytes)) != 0) return leave(hipErrorMemoryAllocation);
    auto* made = new Allocation{memory};
    std::lock_guard<std::mutex> lock(mutex);
    allocations[made] = 1;
    *handle = reinterpret_cast<hipMemGenericAllocationHandle_t>(made);
    return hipSuccess;
}

hipError_t hipMemRelease(hipMemGenericAllocationHandle_t handle) {
    FAKE(memRelease);
    std::lock_guard<std::mutex> lock(mutex);
    auto* allocation = reinterpret_cast<Allocation*>(handle);
    if (allocations.count(allocation) == 0) return leave(hipErrorInvalidValue);
    drop(allocation);
    return hipSuccess;
}

hipError_t hipMemExportToShareableHandle(void* result, hipMemGenericAllocationHandle_t handle, hipMemAllocationHandleType type,
                                      unsigned long long) {
    FAKE(memExport);
    auto* allocation = reinterpret_cast<Allocation*>(handle);
    if (type != hipMemHandleTypePosixFileDescriptor) return leave(hipErrorInvalidValue);
    if (!bug("export_once") || allocation->exported < 0) allocation->exported = dup(allocation->memory);
    *static_cast<int*>(result) = allocation->exported;
    return hipSuccess;
}

hipError_t hipMemImportFromShareableHandle(hipMemGenericAllocationHandle_t* handle, void* descriptor,
                                        hipMemAllocationHandleType) {
    FAKE(memImport);
#ifdef USE_ROCM
    bool by_value = number("FAKE_VERSION", 70253211) >= 70100000;
#else
    bool by_value = true;
#endif
    // As the real one: the wrong form is a pointer that is none.
    int fd = by_value ? static_cast<int>(reinterpret_cast<uintptr_t>(descriptor)) : *static_cast<int*>(descriptor);
    int memory = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (memory < 0) return leave(hipErrorInvalidValue);
    auto* made = new Allocation{memory};
    made->imported = fd;
    std::lock_guard<std::mutex> lock(mutex);
    allocations[made] = 1;
    *handle = reinterpret_cast<hipMemGenericAllocationHandle_t>(made);
    return hipSuccess;
}

hipError_t hipMemAddressReserve(hipDeviceptr_t* address, size_t bytes, size_t, hipDeviceptr_t, unsigned long long) {
    FAKE(memReserve);
    void* start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return leave(hipErrorMemoryAllocation);
    std::lock_guard<std::mutex> lock(mutex);
    ranges[reinterpret_cast<uintptr_t>(start)] = Range{bytes};
    *address = (hipDeviceptr_t)start;
    return hipSuccess;
}

hipError_t hipMemAddressFree(hipDeviceptr_t address, size_t bytes) {
    FAKE(memUnreserve);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = ranges.find(at(address));
    if (found == ranges.end() || found->second.bytes != bytes || found->second.mapped != nullptr)
        return leave(hipErrorInvalidValue);
    munmap(reinterpret_cast<void*>(at(address)), bytes);
    ranges.erase(found);
    return hipSuccess;
}

hipError_t hipMemMap(hipDeviceptr_t address, size_t bytes, size_t, hipMemGenericAllocationHandle_t handle, unsigned long long) {
    FAKE(memMap);
    std::lock_guard<std::mutex> lock(mutex);
    auto* allocation = reinterpret_cast<Allocation*>(handle);
    auto found = ranges.find(at(address));
    struct stat facts{};
    if (found == ranges.end() || allocations.count(allocation) == 0 || fstat(allocation->memory, &facts) != 0 ||
        static_cast<size_t>(facts.st_size) < bytes)
        return leave(hipErrorInvalidValue);
    void* start =
        mmap(reinterpret_cast<void*>(at(address)), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->memory, 0);
    if (start == MAP_FAILED) return leave(hipErrorInvalidValue);
    found->second.mapped = allocation;
    ++allocations[allocation];
    return hipSuccess;
}

hipError_t hipMemUnmap(hipDeviceptr_t address, size_t bytes) {
    FAKE(memUnmap);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = ranges.find(at(address));
    if (found == ranges.end() || found->second.mapped == nullptr) return leave(hipErrorInvalidValue);
    mmap(reinterpret_cast<void*>(at(address)), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    drop(found->second.mapped);
    found->second.mapped = nullptr;
    return hipSuccess;
}

hipError_t hipMemSetAccess(hipDeviceptr_t address, size_t bytes, const hipMemAccessDesc* access, size_t count) {
    FAKE(memAccess);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = ranges.find(at(address));
    if (count != 1 || access->flags != hipMemAccessFlagsProtReadWrite || found == ranges.end() ||
        found->second.mapped == nullptr)
        return leave(hipErrorInvalidValue);
    int imported = found->second.mapped->imported;
    if (bug("access_needs_fd") && imported >= 0 && fcntl(imported, F_GETFD) < 0) return leave(hipErrorInvalidValue);
    mprotect(reinterpret_cast<void*>(at(address)), bytes, PROT_READ | PROT_WRITE);
    return hipSuccess;
}

hipError_t hipMemGetAddressRange(hipDeviceptr_t* base, size_t* bytes, hipDeviceptr_t address) {
    FAKE(memRange);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = around(at(address));
    if (found == ranges.end() || found->second.mapped == nullptr) return leave(hipErrorInvalidValue);
    *base = (hipDeviceptr_t)found->first;
    *bytes = found->second.bytes;  // like HIP: no check for null
    return hipSuccess;
}

hipError_t cuMemGetHandleForAddressRange(void* result, hipDeviceptr_t address, size_t, CUmemRangeHandleType type,
                                       unsigned long long) {
    FAKE(rangeHandle);
    std::lock_guard<std::mutex> lock(mutex);
    auto found = around(at(address));
    if (found == ranges.end() || found->second.mapped == nullptr || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
        return leave(hipErrorInvalidValue);
    *static_cast<int*>(result) = dup(found->second.mapped->memory);
    return hipSuccess;
}

hipError_t hipMemcpyHtoD(hipDeviceptr_t target, const void* source, size_t bytes) {
    FAKE(copyIn);
    if (need_context() != hipSuccess) return need_context();
    std::memcpy(reinterpret_cast<void*>(at(target)), source, bytes);
    return hipSuccess;
}

hipError_t hipMemcpyDtoH(void* target, hipDeviceptr_t source, size_t bytes) {
    FAKE(copyOut);
    if (need_context() != hipSuccess) return need_context();
    std::memcpy(target, reinterpret_cast<void*>(at(source)), bytes);
    return hipSuccess;
}

hipError_t FAKE_SET_WORDS(hipDeviceptr_t target, Word value, size_t count, hipStream_t) {
    FAKE(setWords);
    if (need_context() != hipSuccess) return need_context();
    for (size_t i = 0; i < count; ++i) reinterpret_cast<Word*>(at(target))[i] = value;
    return hipSuccess;
}

hipError_t FAKE_STREAM_CREATE(hipStream_t* stream, unsigned int) {
    FAKE(streamCreate);
    if (need_context() != hipSuccess) return need_context();
    *stream = reinterpret_cast<hipStream_t>(new FakeStream);
    return hipSuccess;
}

hipError_t hipStreamDestroy(hipStream_t stream) {
    FAKE(streamDestroy);
    reinterpret_cast<FakeStream*>(stream)->magic = 0;  // not deleted: what ends on it may come late
    return hipSuccess;
}

hipError_t hipStreamQuery(hipStream_t stream) {
    FAKE(streamQuery);
    auto* fake = reinterpret_cast<FakeStream*>(stream);
    return fake == nullptr || fake->pending == 0 ? hipSuccess : leave(hipErrorNotReady);
}

hipError_t hipStreamSynchronize(hipStream_t) {
    FAKE(streamWait);
    return hipSuccess;
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
hipError_t hipDevicePrimaryCtxRetain(hipCtx_t* context, hipDevice_t device) {
    FAKE(contextRetain);
    *context = reinterpret_cast<hipCtx_t>(static_cast<uintptr_t>(device) + 1);
    return hipSuccess;
}

hipError_t hipCtxGetCurrent(hipCtx_t* context) {
    FAKE(contextCurrent);
    *context = has_context ? reinterpret_cast<hipCtx_t>(static_cast<uintptr_t>(current) + 1) : nullptr;
    return hipSuccess;
}

hipError_t hipCtxSetCurrent(hipCtx_t context) {
    FAKE(contextUse);
    has_context = context != nullptr;
    current = has_context ? static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1 : 0;
    return hipSuccess;
}
#endif
}
