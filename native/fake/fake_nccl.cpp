// Collectives for tests only, with the symbols of NCCL and RCCL: built as libnccl.so.2 and as librccl.so.1. The host
// backend does the work; device memory of the fake driver is ordinary memory to it.
//
//   FAKE_NCCL_ABORT_HANGS=1    ncclCommAbort never returns
//   FAKE_NCCL_FAIL=AllReduce   that call gives ncclInvalidUsage
//   FAKE_NCCL_ERROR_AFTER=n    after n operations the asynchronous error is ncclRemoteError
// Compiled with FAKE_OLD it has none of the optional calls.
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>

#include <unistd.h>

#include "backend.h"
#include "fake_stream.h"
#include "nccl_abi.h"

namespace sft::nccl {

struct Opaque {
    explicit Opaque(std::shared_ptr<Communicator> made, int my_rank = 0) : comm(std::move(made)), rank(my_rank) {}
    std::shared_ptr<Communicator> comm;
    int rank;
    std::mutex mutex;
    bool set_up = false;
    int operations = 0;
    int hesitate = 0;  // as many more answers "in progress"
    std::set<FakeStream*> streams;
    Result error = SUCCESS;
};

}  // namespace sft::nccl

namespace {

using namespace sft;
using namespace sft::nccl;

constexpr auto INVALID_USAGE = static_cast<Result>(5);
constexpr auto SYSTEM_ERROR = static_cast<Result>(2);
constexpr int FOR_EVER = 1 << 30;

const char* setting(const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
}

template <class F>
Result guarded(const char* name, F&& body) {
    if (std::strcmp(setting("FAKE_NCCL_FAIL"), name) == 0) return INVALID_USAGE;
    try {
        return body();
    } catch (const Error& error) {
        return error.status == SFT_REMOTE ? REMOTE_ERROR : SYSTEM_ERROR;
    }
}

// The stream is busy until the operation is over; after an error it stays so until the abort, as a real kernel does.
Result watch(Opaque* comm, Stream stream) {
    auto* busy = static_cast<FakeStream*>(stream);
    if (busy->magic != FakeStream::MAGIC) return INVALID_USAGE;
    busy->pending += 1;
    {
        std::lock_guard<std::mutex> lock(comm->mutex);
        comm->streams.insert(busy);
        comm->operations += 1;
        comm->hesitate = 2;
        int limit = std::atoi(setting("FAKE_NCCL_ERROR_AFTER"));
        if (limit > 0 && comm->operations > limit) comm->error = REMOTE_ERROR;
    }
    std::thread([work = comm->comm, comm, busy] {
        try {
            work->wait(FOR_EVER);
            busy->pending -= 1;
        } catch (const Error& error) {
            if (error.status == SFT_ABORTED) return;
            std::lock_guard<std::mutex> lock(comm->mutex);
            comm->error = REMOTE_ERROR;
        }
    }).detach();
    return IN_PROGRESS;
}

}  // namespace

extern "C" {

#define FAKE_API __attribute__((visibility("default")))

FAKE_API Result ncclGetVersion(int* version) {
    *version = 22707;
    return SUCCESS;
}

FAKE_API Result ncclGetUniqueId(UniqueId* id) {
    return guarded("GetUniqueId", [&] {
        backend().unique_id(reinterpret_cast<uint8_t*>(id->bytes));
        return SUCCESS;
    });
}

FAKE_API Result ncclCommInitRankConfig(Comm* comm, int ranks, UniqueId id, int rank, Config* config) {
    return guarded("InitRankConfig", [&] {
        if (config->magic != 0xcafebeef || config->blocking != 0) return INVALID_USAGE;
        *comm = new Opaque(backend().join(0, reinterpret_cast<uint8_t*>(id.bytes), rank, ranks), rank);
        return IN_PROGRESS;
    });
}

FAKE_API Result ncclCommGetAsyncError(Comm comm, Result* result) {
    return guarded("GetAsyncError", [&] {
        std::lock_guard<std::mutex> lock(comm->mutex);
        *result = comm->error;
        if (comm->error == SUCCESS && !comm->set_up) comm->set_up = comm->comm->state() == SFT_OK;
        if (comm->error == SUCCESS && (!comm->set_up || comm->hesitate-- > 0)) *result = IN_PROGRESS;
        return SUCCESS;
    });
}

FAKE_API Result ncclAllReduce(const void* send, void* receive, size_t count, int type, int reduction, Comm comm,
                              Stream stream) {
    return guarded("AllReduce", [&] {
        if (comm->hesitate > 0) return INVALID_USAGE;  // the call before is not over
        comm->comm->all_reduce(send, receive, count, type, reduction, 0);
        return watch(comm, stream);
    });
}

FAKE_API Result ncclBroadcast(const void*, void* buffer, size_t count, int type, int root, Comm comm, Stream stream) {
    return guarded("Broadcast", [&] {
        if (comm->hesitate > 0) return INVALID_USAGE;
        comm->comm->broadcast(buffer, count, type, root, 0);
        return watch(comm, stream);
    });
}

FAKE_API Result ncclCommAbort(Comm comm) {
    while (*setting("FAKE_NCCL_ABORT_HANGS") == '1') pause();
    return guarded("Abort", [&] {
        comm->comm->abort(0);
        std::lock_guard<std::mutex> lock(comm->mutex);
        for (auto* stream : comm->streams) stream->pending = 0;
        return SUCCESS;  // not deleted: its watchers may still be there
    });
}

FAKE_API Result ncclCommFinalize(Comm comm) {
    return guarded("Finalize", [&] {
        comm->hesitate = 2;
        return IN_PROGRESS;
    });
}

FAKE_API Result ncclCommDestroy(Comm comm) {
    return guarded("Destroy", [&] {
        comm->comm->close(0);
        return SUCCESS;
    });
}

FAKE_API Result ncclCommUserRank(Comm comm, int* rank) {
    *rank = comm->rank;
    return SUCCESS;
}

FAKE_API Result ncclCommCount(Comm comm, int* ranks) {
    *ranks = comm->comm->rank_count();
    return SUCCESS;
}

FAKE_API const char* ncclGetErrorString(Result) { return "a fake error"; }

#ifndef FAKE_OLD
FAKE_API const char* ncclGetLastError(Comm) { return "and its detail"; }

FAKE_API Result ncclCommSplit(Comm comm, int colour, int key, Comm* child, Config* config) {
    return guarded("Split", [&] {
        if (config->magic != 0xcafebeef) return INVALID_USAGE;
        auto made = comm->comm->split(colour, key);
        comm->hesitate = 2;
        if (made) *child = new Opaque(made);
        return IN_PROGRESS;
    });
}

FAKE_API Result ncclCommShrink(Comm comm, int* excluded, int count, Comm* child, Config* config, int flags) {
    return guarded("Shrink", [&] {
        if (config->magic != 0xcafebeef || flags != SHRINK_ABORT) return INVALID_USAGE;
        auto made = comm->comm->shrink(std::vector<int>(excluded, excluded + count));
        comm->error = SUCCESS;
        comm->hesitate = 2;
        *child = new Opaque(made);
        return IN_PROGRESS;
    });
}
#endif
}
