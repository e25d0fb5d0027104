// The part of NCCL's and RCCL's binary interface that is used here, in our own words.
//
// The two libraries share it, and nccl.h comes only with packages of hundreds of megabytes, so it is not needed to
// build. tests/native compares every line with the vendor's header where there is one (native/tests/nccl_check.cpp).
#pragma once

#include <climits>
#include <cstddef>

namespace sft::nccl {

struct Opaque;
using Comm = Opaque*;

enum Result : int { SUCCESS = 0, REMOTE_ERROR = 6, IN_PROGRESS = 7 };

struct UniqueId {
    char bytes[128];
};

// As of NCCL 2.18. `size` and `version` tell a newer library where it ends: the rest gets that library's defaults.
struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21800;
    int blocking = 0;
    int cga_cluster_size = INT_MIN;  // INT_MIN and null: not given
    int min_ctas = INT_MIN;
    int max_ctas = INT_MIN;
    const char* net_name = nullptr;
    int split_share = INT_MIN;
};

constexpr int SPLIT_NO_COLOUR = -1;
constexpr int SHRINK_ABORT = 1;  // end what runs on the parent

// Streams are pointers in CUDA and in HIP.
using Stream = void*;
using GetVersion = Result(int*);
using GetUniqueId = Result(UniqueId*);
using InitRankConfig = Result(Comm*, int, UniqueId, int, Config*);
using GetAsyncError = Result(Comm, Result*);
using AllReduce = Result(const void*, void*, size_t, int, int, Comm, Stream);
using Broadcast = Result(const void*, void*, size_t, int, int, Comm, Stream);
using Abort = Result(Comm);
using Finalize = Result(Comm);
using Destroy = Result(Comm);
using UserRank = Result(Comm, int*);
using Count = Result(Comm, int*);
using GetErrorString = const char*(Result);
using GetLastError = const char*(Comm);
using Split = Result(Comm, int, int, Comm*, Config*);
using Shrink = Result(Comm, int*, int, Comm*, Config*, int);

// Without these there are no collectives.
#define SFT_NCCL_NEEDED(_)                    \
    _(GetVersion, ncclGetVersion)             \
    _(GetUniqueId, ncclGetUniqueId)           \
    _(InitRankConfig, ncclCommInitRankConfig) \
    _(GetAsyncError, ncclCommGetAsyncError)   \
    _(AllReduce, ncclAllReduce)               \
    _(Broadcast, ncclBroadcast)               \
    _(Abort, ncclCommAbort)                   \
    _(Finalize, ncclCommFinalize)             \
    _(Destroy, ncclCommDestroy)               \
    _(UserRank, ncclCommUserRank)             \
    _(Count, ncclCommCount)                   \
    _(GetErrorString, ncclGetErrorString)
// Without one of these, only what it does is absent.
#define SFT_NCCL_OPTIONAL(_)          \
    _(GetLastError, ncclGetLastError) \
    _(Split, ncclCommSplit)           \
    _(Shrink, ncclCommShrink)

}  // namespace sft::nccl
