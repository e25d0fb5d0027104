// Made by scripts/hipify from native/src/gpu.cpp. Edit that, then run it again.
// The GPU backend, written once in the CUDA dialect. scripts/hipify makes its twin, native/hip/gpu_hip.cpp.
//
// Only the vendor's headers are needed to build it. Each function is called through a table that is filled at run time;
// the table's members have names of our own, so that hipify has to translate only the second column of the list, and
// with it the text that dlsym gets.
//
// Where HIP behaves differently, the code is inside USE_ROCM or says so:
//   - an error sticks until it is asked for (hipGetLastError), and would be reported by the next good call;
//   - before 7.1 the import takes a pointer to the descriptor, later the descriptor itself;
//   - a second export after the first descriptor was closed gives a dead one: export once, keep it, pass on copies;
//   - an imported descriptor must stay open until access was set;
//   - hipMemGetAddressRange faults when one of its results is not wanted;
//   - a dma-buf of a part does not tell its offset: export the whole allocation and count ourselves;
//   - there is no context to make current, the device is a property of the thread.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <thread>

#include <fcntl.h>

#include <hip/hip_runtime.h>

#include "gpu_names.h"
#include "backend.h"
#include "nccl_abi.h"
#include "vendor.h"

#define SFT_DRIVER(_)                                \
    _(init, hipInit)                                  \
    _(driverVersion, hipDriverGetVersion)             \
    _(deviceCount, hipGetDeviceCount)                 \
    _(deviceGet, hipDeviceGet)                        \
    _(deviceName, hipDeviceGetName)                   \
    _(deviceBytes, cuDeviceTotalMem)                 \
    _(deviceBusId, hipDeviceGetPCIBusId)              \
    _(deviceAttribute, hipDeviceGetAttribute)         \
    _(errorString, hipDrvGetErrorString)                 \
    _(memInfo, hipMemGetInfo)                         \
    _(memGranularity, hipMemGetAllocationGranularity) \
    _(memCreate, hipMemCreate)                        \
    _(memRelease, hipMemRelease)                      \
    _(memExport, hipMemExportToShareableHandle)       \
    _(memImport, hipMemImportFromShareableHandle)     \
    _(memReserve, hipMemAddressReserve)               \
    _(memUnreserve, hipMemAddressFree)                \
    _(memMap, hipMemMap)                              \
    _(memUnmap, hipMemUnmap)                          \
    _(memAccess, hipMemSetAccess)                     \
    _(memRange, hipMemGetAddressRange)                \
    _(copyIn, hipMemcpyHtoD)                          \
    _(copyOut, hipMemcpyDtoH)                         \
    _(streamQuery, hipStreamQuery)                    \
    _(streamDestroy, hipStreamDestroy)                \
    _(streamWait, hipStreamSynchronize)
#define SFT_DRIVER_OPTIONAL(_) _(rangeHandle, cuMemGetHandleForAddressRange)

// hipify would make hipMemsetAsync, which counts bytes, of hipMemsetAsync, and a name that does not exist of
// hipStreamCreate__: these two are therefore written for both.
#ifdef USE_ROCM
#define SFT_PLATFORM(_)                       \
    _(setWords, hipMemsetD32Async)            \
    _(streamCreate, hipStreamCreateWithFlags) \
    _(runtimeVersion, hipRuntimeGetVersion)   \
    _(clearError, hipGetLastError)            \
    _(currentDevice, hipGetDevice)            \
    _(useDevice, hipSetDevice)
#else
#define SFT_PLATFORM(_)                        \
    _(setWords, hipMemsetAsync)              \
    _(streamCreate, hipStreamCreate__)            \
    _(contextRetain, hipDevicePrimaryCtxRetain) \
    _(contextCurrent, hipCtxGetCurrent)         \
    _(contextUse, hipCtxSetCurrent)
#endif

// In two steps, so that hipMemGetAddressRange becomes what the header makes of it, such as hipMemGetAddressRange.
#define SFT_TEXT2(x) #x
#define SFT_TEXT(x) SFT_TEXT2(x)

namespace sft {

namespace {

#ifdef USE_ROCM
constexpr const char* PLATFORM = "rocm";
constexpr const char* DRIVER_STEM = "libamdhip64.so";
constexpr const char* COLLECTIVES_STEM = "librccl.so";
constexpr int OLDEST = 70000000;           // 7.0
constexpr int IMPORT_BY_VALUE = 70100000;  // 7.1
std::vector<std::string> below_rocm(const std::string& name) {
    const char* root = std::getenv("ROCM_PATH");
    return {name, std::string(root != nullptr && *root != '\0' ? root : "/opt/rocm") + "/lib/" + name};
}
std::vector<std::string> driver_names() { return below_rocm("libamdhip64.so.7"); }
std::vector<std::string> collectives_names() { return below_rocm("librccl.so.1"); }
#else
constexpr const char* PLATFORM = "cuda";
constexpr const char* DRIVER_STEM = "libcuda.so";
constexpr const char* COLLECTIVES_STEM = "libnccl.so";
constexpr int OLDEST = 11070;  // the first with cuMemGetHandleForAddressRange
std::vector<std::string> driver_names() { return {"libcuda.so.1"}; }
std::vector<std::string> collectives_names() { return {"libnccl.so.2"}; }
#endif

struct Driver {
#define SFT_MEMBER(name, symbol)      \
    decltype(&symbol) name = nullptr; \
    static constexpr const char* name##Text = SFT_TEXT(symbol);
    SFT_DRIVER(SFT_MEMBER) SFT_DRIVER_OPTIONAL(SFT_MEMBER) SFT_PLATFORM(SFT_MEMBER)
#undef SFT_MEMBER
};

struct Collectives {
#define SFT_MEMBER(name, symbol) nccl::name* name = nullptr;
    SFT_NCCL_NEEDED(SFT_MEMBER) SFT_NCCL_OPTIONAL(SFT_MEMBER)
#undef SFT_MEMBER
};

Driver driver;
Collectives collectives;

// Clears what would stick to the thread. Must follow every call that did not succeed.
void forget_error() {
#ifdef USE_ROCM
    (void)driver.clearError();
#endif
}

int status_of(hipError_t result) {
    if (result == hipErrorMemoryAllocation) return SFT_NO_MEMORY;
    if (result == hipErrorNoDevice) return SFT_ABSENT;
    if (result == hipErrorNotSupported) return SFT_UNSUPPORTED;
    return SFT_DRIVER;
}

void check(hipError_t result, const char* call) {
    if (result == hipSuccess) return;
    forget_error();
    const char* text = nullptr;
    if (driver.errorString(result, &text) != hipSuccess || text == nullptr) {
        forget_error();
        text = "no text for it";
    }
    fail(status_of(result), "%s: %s (%d)", call, text, static_cast<int>(result));
}

#define SFT_CALL(name, ...) check(driver.name(__VA_ARGS__), Driver::name##Text)
// On the way out of a failure, where nothing more can be reported.
#define SFT_QUIETLY(name, ...)                                        \
    do {                                                              \
        if (driver.name(__VA_ARGS__) != hipSuccess) forget_error(); \
    } while (false)

// Makes a device the thread's own for a while, and gives back what was there: torch has its own idea of it.
class OnDevice {
  public:
#ifdef USE_ROCM
    explicit OnDevice(int device) {
        SFT_CALL(currentDevice, &before_);
        if (before_ == device) return;
        SFT_CALL(useDevice, device);
        changed_ = true;
    }
    ~OnDevice() {
        if (changed_) SFT_QUIETLY(useDevice, before_);
    }

  private:
    int before_ = 0;
#else
    explicit OnDevice(int device) {
        hipDevice_t handle;
        hipCtx_t context;
        SFT_CALL(deviceGet, &handle, device);
        SFT_CALL(contextCurrent, &before_);
        // The primary context is the one that torch uses. It is retained for good: once a call is enough, more do no
        // harm.
        SFT_CALL(contextRetain, &context, handle);
        if (context == before_) return;
        SFT_CALL(contextUse, context);
        changed_ = true;
    }
    ~OnDevice() {
        if (changed_) SFT_QUIETLY(contextUse, before_);
    }

  private:
    hipCtx_t before_ = nullptr;
#endif
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    bool changed_ = false;
};

// --- memory ---

hipMemAllocationProp allocation(int device) {
    hipMemAllocationProp prop;
    std::memset(&prop, 0, sizeof prop);
    prop.type = hipMemAllocationTypePinned;
    prop.requestedHandleTypes = hipMemHandleTypePosixFileDescriptor;
    prop.location.type = hipMemLocationTypeDevice;
    prop.location.id = device;
#ifndef USE_ROCM
    // CUDA wants to know before it allocates that a network device may read it; HIP does not ask.
    int capable = 0;
    SFT_QUIETLY(deviceAttribute, &capable, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device);
    prop.allocFlags.gpuDirectRDMACapable = capable != 0;
#endif
    return prop;
}

uint64_t granularity_of(int device) {
    hipMemAllocationProp prop = allocation(device);
    size_t granularity = 0;
    SFT_CALL(memGranularity, &granularity, &prop, hipMemAllocationGranularityRecommended);
    return granularity;
}

uint64_t rounded(uint64_t bytes, int device) {
    uint64_t granularity = std::max<uint64_t>(granularity_of(device), 1);
    return (bytes + granularity - 1) / granularity * granularity;
}

Fd duplicate(int fd, int status) {
    Fd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (copy.get() < 0) fail(status, "descriptor %d: %s", fd, std::strerror(errno));
    return copy;
}

hipStream_t stream_of(uint64_t stream) { return reinterpret_cast<hipStream_t>(static_cast<uintptr_t>(stream)); }

class GpuMemory : public Memory {
  public:
    // Makes it, and exports it once: a later second export may not work.
    GpuMemory(int device, uint64_t bytes) : device_(device), bytes_(bytes), imported_(false) {
        OnDevice on(device);
        reserved_ = rounded(bytes, device);
        hipMemAllocationProp prop = allocation(device);
        SFT_CALL(memCreate, &handle_, reserved_, &prop, 0);
        has_handle_ = true;
        finish_or_undo([&] {
            int fd = -1;
            SFT_CALL(memExport, &fd, handle_, hipMemHandleTypePosixFileDescriptor, 0);
            fd_ = Fd(fd);
            fcntl(fd, F_SETFD, FD_CLOEXEC);
            map();
        });
    }

    // Maps one that another process made. Our copy of the descriptor stays open: beyond the setting of access, and for
    // export.
    GpuMemory(int device, uint64_t bytes, Fd fd) : device_(device), bytes_(bytes), imported_(true), fd_(std::move(fd)) {
        OnDevice on(device);
        reserved_ = rounded(bytes, device);
        // A dma-buf tells its size; where the descriptor does not, the driver has to notice.
        off_t size = lseek(fd_.get(), 0, SEEK_END);
        if (size >= 0) lseek(fd_.get(), 0, SEEK_SET);
        if (size > 0 && static_cast<uint64_t>(size) < reserved_)
            fail(SFT_INVALID, "the descriptor has %lld bytes, %llu were asked for", static_cast<long long>(size),
                 static_cast<unsigned long long>(bytes));
        int number = fd_.get();
        void* descriptor = reinterpret_cast<void*>(static_cast<uintptr_t>(number));
#ifdef USE_ROCM
        int version = 0;
        SFT_CALL(runtimeVersion, &version);
        if (version < IMPORT_BY_VALUE) descriptor = &number;
#endif
        SFT_CALL(memImport, &handle_, descriptor, hipMemHandleTypePosixFileDescriptor);
        has_handle_ = true;
        finish_or_undo([&] { map(); });
    }

    ~GpuMemory() override {
        try {
            OnDevice on(device_);
            undo();
        } catch (const Error&) {  // the driver is shutting down: it takes the memory with it
        }
    }

    sft_memory_info info() const override {
        return {static_cast<uint64_t>(number_of(address_)), bytes_, reserved_, device_, imported_ ? 1 : 0};
    }
    Fd export_fd() override { return duplicate(fd_.get(), SFT_SYSTEM); }
    void write(uint64_t offset, const void* source, uint64_t bytes) override {
        OnDevice on(device_);
        SFT_CALL(copyIn, at(offset), source, bytes);
    }
    void read(uint64_t offset, void* target, uint64_t bytes) override {
        OnDevice on(device_);
        SFT_CALL(copyOut, target, at(offset), bytes);
    }
    void flag(uint64_t offset, uint32_t value, uint64_t stream) override {
        OnDevice on(device_);
        SFT_CALL(setWords, at(offset), value, 1, stream_of(stream));
        if (stream == 0) SFT_CALL(streamWait, stream_of(stream));
    }

  private:
    // hipDeviceptr_t is a number in CUDA and a pointer in HIP.
    static uintptr_t number_of(hipDeviceptr_t address) { return (uintptr_t)address; }  // NOLINT
    hipDeviceptr_t at(uint64_t offset) const { return (hipDeviceptr_t)(number_of(address_) + offset); }

    void map() {
        SFT_CALL(memReserve, &address_, reserved_, 0, hipDeviceptr_t{}, 0);
        has_range_ = true;
        SFT_CALL(memMap, address_, reserved_, 0, handle_, 0);
        is_mapped_ = true;
        hipMemAccessDesc access;
        std::memset(&access, 0, sizeof access);
        access.location.type = hipMemLocationTypeDevice;
        access.location.id = device_;
        access.flags = hipMemAccessFlagsProtReadWrite;
        SFT_CALL(memAccess, address_, reserved_, &access, 1);
    }

    template <class F>
    void finish_or_undo(F&& body) {
        try {
            body();
        } catch (...) {
            undo();
            throw;
        }
    }

    void undo() {
        if (is_mapped_) SFT_QUIETLY(memUnmap, address_, reserved_);
        if (has_range_) SFT_QUIETLY(memUnreserve, address_, reserved_);
        if (has_handle_) SFT_QUIETLY(memRelease, handle_);
        is_mapped_ = has_range_ = has_handle_ = false;
    }

    int device_;
    uint64_t bytes_, reserved_ = 0;
    bool imported_;
    Fd fd_;
    hipMemGenericAllocationHandle_t handle_{};
    hipDeviceptr_t address_{};
    bool has_handle_ = false, has_range_ = false, is_mapped_ = false;
};

// --- collectives ---

void check_nccl(nccl::Result result, const char* call, nccl::Comm comm) {
    if (result == nccl::SUCCESS || result == nccl::IN_PROGRESS) return;
    const char* detail = collectives.GetLastError != nullptr ? collectives.GetLastError(comm) : "";
    fail(result == nccl::REMOTE_ERROR ? SFT_REMOTE : SFT_COLLECTIVE, "%s: %s (%d) %s", call,
         collectives.GetErrorString(result), static_cast<int>(result), detail != nullptr ? detail : "");
}

#define SFT_NCCL(name, comm, ...) check_nccl(collectives.name(__VA_ARGS__), "nccl " #name, comm)

// What a split or shrink gives, once the parent is done with it. The library writes here when it likes, so it lives on.
struct Birth {
    nccl::Comm made = nullptr;
    nccl::Config config;
    std::vector<int> excluded;
    std::atomic<bool> settled{false};
};

class GpuCommunicator : public Communicator, public std::enable_shared_from_this<GpuCommunicator> {
  public:
    GpuCommunicator(int device, const uint8_t* id, int rank, int ranks) : device_(device), rank_(rank), ranks_(ranks) {
        OnDevice on(device);
        nccl::UniqueId unique;
        std::memcpy(unique.bytes, id, sizeof unique.bytes);
        nccl::Config config;
        make_stream();
        nccl::Comm made = nullptr;
        SFT_NCCL(InitRankConfig, nullptr, &made, ranks, unique, rank, &config);
        comm_ = made;
    }
    // A child whose parent is still busy with it. After a split only the library knows its rank and size.
    GpuCommunicator(std::shared_ptr<GpuCommunicator> parent, std::shared_ptr<Birth> birth, int rank, int ranks)
        : device_(parent->device_), rank_(rank), ranks_(ranks), parent_(std::move(parent)), birth_(std::move(birth)) {
        OnDevice on(device_);
        make_stream();
    }
    ~GpuCommunicator() override {
        try {
            if (comm_ != nullptr) abort(0);
            OnDevice on(device_);
            SFT_QUIETLY(streamDestroy, stream_);
        } catch (const Error&) {  // it hangs, or the driver is gone; nothing more can be done
        }
    }

    int rank_count() const override { return ranks_; }

    int state() override {
        std::lock_guard<std::timed_mutex> lock(mutex_);
        return state_locked();
    }

    int wait(int milliseconds) override {
        using namespace std::chrono;
        auto end = steady_clock::now() + std::chrono::milliseconds(milliseconds);
        for (auto pause = microseconds(20);; pause = std::min(pause * 2, microseconds(1000))) {
            if (state() == SFT_OK) return SFT_OK;
            if (steady_clock::now() >= end) fail(SFT_TIMEOUT, "not finished within %d ms", milliseconds);
            std::this_thread::sleep_for(pause);
        }
    }

    void all_reduce(const void* send, void* receive, uint64_t count, int type, int reduction,
                    uint64_t stream) override {
        std::lock_guard<std::timed_mutex> lock(mutex_);
        need_idle_library();
        OnDevice on(device_);
        SFT_NCCL(AllReduce, comm_, send, receive, count, type, reduction, comm_, used(stream));
    }

    void broadcast(void* buffer, uint64_t count, int type, int root, uint64_t stream) override {
        std::lock_guard<std::timed_mutex> lock(mutex_);
        need_idle_library();
        OnDevice on(device_);
        SFT_NCCL(Broadcast, comm_, buffer, buffer, count, type, root, comm_, used(stream));
    }

    std::shared_ptr<Communicator> split(int colour, int key) override {
        if (collectives.Split == nullptr) fail(SFT_UNSUPPORTED, "this NCCL or RCCL has no ncclCommSplit");
        std::lock_guard<std::timed_mutex> lock(mutex_);
        need_idle_library();
        OnDevice on(device_);
        auto birth = std::make_shared<Birth>();
        births_.push_back(birth);
        int group = colour < 0 ? nccl::SPLIT_NO_COLOUR : colour;
        SFT_NCCL(Split, comm_, comm_, group, key, &birth->made, &birth->config);
        if (colour < 0) return nullptr;
        return std::make_shared<GpuCommunicator>(shared_from_this(), birth, -1, 1);
    }

    std::shared_ptr<Communicator> shrink(const std::vector<int>& excluded) override {
        if (collectives.Shrink == nullptr) fail(SFT_UNSUPPORTED, "this NCCL or RCCL has no ncclCommShrink");
        if (std::binary_search(excluded.begin(), excluded.end(), rank_.load()))
            fail(SFT_INVALID, "rank %d excludes itself", rank_.load());
        std::lock_guard<std::timed_mutex> lock(mutex_);
        need_alive();
        OnDevice on(device_);
        auto birth = std::make_shared<Birth>();
        birth->excluded = excluded;
        births_.push_back(birth);
        auto count = static_cast<int>(excluded.size());
        SFT_NCCL(Shrink, comm_, comm_, birth->excluded.data(), count, &birth->made, &birth->config, nccl::SHRINK_ABORT);
        auto below = std::lower_bound(excluded.begin(), excluded.end(), rank_.load()) - excluded.begin();
        return std::make_shared<GpuCommunicator>(shared_from_this(), birth, rank_ - static_cast<int>(below),
                                                 ranks_ - count);
    }

    // The vendor's abort may hang itself, so it runs in a thread of its own and is waited for only so long.
    void abort(int milliseconds) override {
        {
            // Whoever holds the lock may be stuck in the library; abort exists to end just that.
            std::unique_lock<std::timed_mutex> lock(mutex_, std::chrono::milliseconds(std::min(milliseconds, 100)));
            if (aborted_.exchange(true)) return;
        }
        nccl::Comm comm = comm_.exchange(nullptr);
        if (comm == nullptr) return;
        end_with(collectives.Abort, comm, milliseconds, "abort");
    }

    void close(int milliseconds) override {
        if (aborted_) return;
        auto begin = std::chrono::steady_clock::now();
        try {
            wait(milliseconds);
            {
                std::lock_guard<std::timed_mutex> lock(mutex_);
                OnDevice on(device_);
                SFT_NCCL(Finalize, comm_, comm_);
            }
            auto spent =
                std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
            wait(std::max(milliseconds - static_cast<int>(spent.count()), 1));
        } catch (const Error&) {
            abort(std::max(milliseconds, ABORT_MILLISECONDS));
            return;
        }
        if (aborted_.exchange(true)) return;
        if (nccl::Comm comm = comm_.exchange(nullptr))
            end_with(collectives.Destroy, comm, std::max(milliseconds, ABORT_MILLISECONDS), "destroy");
    }

  private:
    static constexpr int ABORT_MILLISECONDS = 5000;
    static constexpr auto BUSY = std::chrono::seconds(10);

    struct Ending {
        std::mutex mutex;
        std::condition_variable changed;
        bool done = false;
        nccl::Result result = nccl::SUCCESS;
    };

    void end_with(nccl::Abort* end, nccl::Comm comm, int milliseconds, const char* what) {
        auto ending = std::make_shared<Ending>();
        std::thread([ending, end, comm, device = device_] {
            nccl::Result result = nccl::SUCCESS;
            try {
                OnDevice on(device);
                result = end(comm);
            } catch (const Error&) {  // no device any more: nothing to end
            }
            std::lock_guard<std::mutex> lock(ending->mutex);
            ending->result = result;
            ending->done = true;
            ending->changed.notify_all();
        }).detach();
        std::unique_lock<std::mutex> lock(ending->mutex);
        if (!ending->changed.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return ending->done; }))
            fail(SFT_TIMEOUT, "the library's own %s hangs; this process has to end", what);
        check_nccl(ending->result, what, nullptr);
    }

    void make_stream() {
        hipStream_t stream = nullptr;
        SFT_CALL(streamCreate, &stream, hipStreamNonBlocking);
        stream_ = stream;
        last_ = stream;
    }

    // Operations may be on several streams over time; the last one tells, since they run in the order of their calls.
    nccl::Stream used(uint64_t stream) {
        last_ = stream == 0 ? stream_ : stream_of(stream);
        return last_;
    }

    void need_alive() {
        if (aborted_ || (comm_ == nullptr && birth_ == nullptr))
            fail(SFT_ABORTED, "the communicator was aborted or closed");
    }

    // In its non-blocking mode the library takes no call before it is done with the one before.
    void need_idle_library() {
        using namespace std::chrono;
        for (auto end = steady_clock::now() + BUSY; busy(); std::this_thread::sleep_for(microseconds(20))) {
            if (!set_up_) fail(SFT_INVALID, "the communicator is still being set up: wait for it first");
            if (steady_clock::now() > end) fail(SFT_TIMEOUT, "the library is still busy with the call before");
        }
    }

    bool busy() {
        need_alive();
        if (comm_ == nullptr && !born()) return true;
        nccl::Result result = nccl::SUCCESS;
        SFT_NCCL(GetAsyncError, comm_, comm_, &result);
        if (result == nccl::IN_PROGRESS) return true;
        for (auto& birth : births_) birth->settled = true;
        births_.clear();
        check_nccl(result, "asynchronous error", comm_);
        if (!set_up_ && rank_ < 0) {
            int rank = 0, ranks = 0;
            SFT_NCCL(UserRank, comm_, comm_, &rank);
            SFT_NCCL(Count, comm_, comm_, &ranks);
            rank_ = rank;
            ranks_ = ranks;
        }
        set_up_ = true;
        return false;
    }

    // Takes over what the parent made, when it has.
    bool born() {
        if (!birth_->settled) parent_->state();
        if (!birth_->settled) return false;
        if (birth_->made == nullptr) fail(SFT_COLLECTIVE, "the library gave no communicator");
        comm_ = birth_->made;
        parent_.reset();
        return true;
    }

    int state_locked() {
        if (busy()) return SFT_IN_PROGRESS;
        OnDevice on(device_);
        hipError_t query = driver.streamQuery(last_);
        if (query == hipErrorNotReady) {
            forget_error();
            return SFT_IN_PROGRESS;
        }
        check(query, Driver::streamQueryText);
        return SFT_OK;
    }

    const int device_;
    std::atomic<int> rank_, ranks_;
    std::timed_mutex mutex_;
    std::atomic<nccl::Comm> comm_{nullptr};
    std::atomic<bool> aborted_{false};
    bool set_up_ = false;
    std::shared_ptr<GpuCommunicator> parent_;
    std::shared_ptr<Birth> birth_;
    std::vector<std::shared_ptr<Birth>> births_;
    hipStream_t stream_ = nullptr, last_ = nullptr;
};

// --- the backend ---

class GpuBackend : public Backend {
  public:
    const char* platform() const override { return PLATFORM; }

    void open() override {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!driver_ready_) open_driver();
        if (!collectives_ready_) open_collectives();
    }

    uint32_t features() override {
        need_open();
        uint32_t found = SFT_FEATURE_MEMORY;
        if (driver.rangeHandle != nullptr) found |= SFT_FEATURE_DMABUF;
        if (!collectives_ready_) return found;
        found |= SFT_FEATURE_COLLECTIVES;
        if (collectives.Split != nullptr) found |= SFT_FEATURE_SPLIT;
        if (collectives.Shrink != nullptr) found |= SFT_FEATURE_SHRINK;
        return found;
    }

    void versions(int& driver_version, int& collectives_version) override {
        need_open();
        driver_version = version_;
        collectives_version = 0;
        if (collectives_ready_) SFT_NCCL(GetVersion, nullptr, &collectives_version);
    }

    std::string describe() override {
        std::lock_guard<std::mutex> lock(mutex_);
        return line("driver", driver_, driver_ready_) + line("collectives", collectives_, collectives_ready_);
    }

    int device_count() override {
        need_open();
        int count = 0;
        SFT_CALL(deviceCount, &count);
        return count;
    }

    sft_device_info device(int device) override {
        sft_device_info info{};
        hipDevice_t handle;
        size_t bytes = 0;
        int supported = 0;
        SFT_CALL(deviceGet, &handle, device);
        SFT_CALL(deviceName, info.name, static_cast<int>(sizeof info.name), handle);
        SFT_CALL(deviceBytes, &bytes, handle);
        SFT_CALL(deviceBusId, info.bus_id, static_cast<int>(sizeof info.bus_id), handle);
        SFT_CALL(deviceAttribute, &supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, handle);
        info.bytes = bytes;
        if (supported == 0) return info;
        info.features = SFT_FEATURE_MEMORY;
        info.granularity = granularity_of(device);
        if (dmabuf_supported(handle)) info.features |= SFT_FEATURE_DMABUF;
        return info;
    }

    void device_free(int device, uint64_t& free_bytes, uint64_t& bytes) override {
        OnDevice on(device);
        size_t free_now = 0, all = 0;
        SFT_CALL(memInfo, &free_now, &all);
        free_bytes = free_now;
        bytes = all;
    }

    std::shared_ptr<Memory> create(int device, uint64_t bytes, uint32_t) override {
        need_memory(device);
        return std::make_shared<GpuMemory>(device, bytes);
    }

    std::shared_ptr<Memory> import(int device, int fd, uint64_t bytes) override {
        need_memory(device);
        return std::make_shared<GpuMemory>(device, bytes, duplicate(fd, SFT_INVALID));
    }

    Fd dmabuf(int device, uint64_t address, uint64_t bytes, uint64_t& offset, uint64_t& whole) override {
        if (driver.rangeHandle == nullptr) fail(SFT_UNSUPPORTED, "this driver gives no dma-bufs");
        OnDevice on(device);
        hipDeviceptr_t base{};
        size_t size = 0;
        SFT_CALL(memRange, &base, &size, (hipDeviceptr_t)(uintptr_t)address);
        uint64_t start = (uintptr_t)base;
        if (bytes > size || address - start > size - bytes)
            fail(SFT_INVALID, "%llu bytes there reach beyond the allocation", static_cast<unsigned long long>(bytes));
        int fd = -1;
        SFT_CALL(rangeHandle, &fd, base, size, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
        fcntl(fd, F_SETFD, FD_CLOEXEC);
        offset = address - start;
        whole = size;
        return Fd(fd);
    }

    void unique_id(uint8_t* id) override {
        need_collectives();
        nccl::UniqueId made;
        SFT_NCCL(GetUniqueId, nullptr, &made);
        std::memcpy(id, made.bytes, sizeof made.bytes);
    }

    std::shared_ptr<Communicator> join(int device, const uint8_t* id, int rank, int ranks) override {
        need_collectives();
        return std::make_shared<GpuCommunicator>(device, id, rank, ranks);
    }

  private:
    void need_open() {
        if (!driver_ready_) fail(SFT_ABSENT, "not opened: %s", driver_.why.c_str());
    }
    void need_collectives() {
        need_open();
        if (!collectives_ready_) fail(SFT_UNSUPPORTED, "no collectives: %s", collectives_.why.c_str());
    }
    void need_memory(int device) {
        hipDevice_t handle;
        int supported = 0;
        SFT_CALL(deviceGet, &handle, device);
        SFT_CALL(deviceAttribute, &supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, handle);
        if (supported == 0) fail(SFT_UNSUPPORTED, "device %d has no virtual memory management", device);
    }
    bool dmabuf_supported(hipDevice_t handle) {
        if (driver.rangeHandle == nullptr) return false;
#ifdef USE_ROCM
        (void)handle;  // HIP has no attribute for it
        return true;
#else
        int supported = 0;
        SFT_CALL(deviceAttribute, &supported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, handle);
        return supported != 0;
#endif
    }

    void open_driver() {
        driver_ = open_vendor(DRIVER_STEM, driver_names());
        if (driver_.handle == nullptr) fail(SFT_ABSENT, "%s", driver_.why.c_str());
        std::string missing;
        // clang-format off
#define SFT_FILL(name, symbol) \
    driver.name = reinterpret_cast<decltype(driver.name)>(symbol_of(driver_, Driver::name##Text));
        SFT_DRIVER(SFT_FILL) SFT_PLATFORM(SFT_FILL) SFT_DRIVER_OPTIONAL(SFT_FILL)
#undef SFT_FILL
#define SFT_MISSING(name, symbol) \
    if (driver.name == nullptr) missing += std::string(" ") + Driver::name##Text;
        SFT_DRIVER(SFT_MISSING) SFT_PLATFORM(SFT_MISSING)
#undef SFT_MISSING
            // clang-format on
            refuse_if(!missing.empty(), SFT_ABSENT, driver_.path + " lacks" + missing);
        // Before init: HIP tells its version without a device.
#ifdef USE_ROCM
        SFT_CALL(runtimeVersion, &version_);
#else
        SFT_CALL(driverVersion, &version_);
#endif
        refuse_if(version_ < OLDEST, SFT_UNSUPPORTED,
                  driver_.path + " is of version " + std::to_string(version_) + ", " + std::to_string(OLDEST) +
                      " is the oldest that works");
        try {
            SFT_CALL(init, 0);
        } catch (const Error& error) {
            driver_.why = error.text;
            throw;
        }
        driver_ready_ = true;
    }

    void refuse_if(bool wrong, int status, const std::string& why) {
        if (!wrong) return;
        driver_.why = why;
        fail(status, "%s", why.c_str());
    }

    // Absent collectives are no failure: memory and probes work without.
    void open_collectives() {
        collectives_ = open_vendor(COLLECTIVES_STEM, collectives_names());
        if (collectives_.handle == nullptr) return;
        std::string missing;
        // clang-format off
#define SFT_FILL(name, symbol) \
    collectives.name = reinterpret_cast<nccl::name*>(symbol_of(collectives_, SFT_TEXT(symbol)));
        SFT_NCCL_NEEDED(SFT_FILL) SFT_NCCL_OPTIONAL(SFT_FILL)
#undef SFT_FILL
#define SFT_MISSING(name, symbol) \
    if (collectives.name == nullptr) missing += " " SFT_TEXT(symbol);
        SFT_NCCL_NEEDED(SFT_MISSING)
#undef SFT_MISSING
            // clang-format on
            collectives_ready_ = missing.empty();
        if (!collectives_ready_) collectives_.why = collectives_.path + " lacks" + missing;
    }

    static std::string line(const char* part, const Vendor& vendor, bool ready) {
        std::string text = std::string(part) + ": ";
        if (!ready) return text + "absent: " + (vendor.why.empty() ? "not looked for" : vendor.why) + "\n";
        return text + vendor.path + (vendor.adopted ? ", as the process had loaded it\n" : "\n");
    }

    std::mutex mutex_;
    Vendor driver_, collectives_;
    bool driver_ready_ = false, collectives_ready_ = false;
    int version_ = 0;
};

}  // namespace

Backend& backend() {
    static auto& instance = *new GpuBackend;
    return instance;
}

}  // namespace sft
