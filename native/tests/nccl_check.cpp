// Compiled only, never run: holds native/src/nccl_abi.h against the header of a real NCCL (-DNCCL) or RCCL.
#include <cstddef>
#include <type_traits>

#ifdef NCCL
#include <nccl.h>
#else
#include <rccl/rccl.h>
#endif

#include "nccl_abi.h"
#include "slurm_ft_native.h"

namespace {

using namespace sft::nccl;

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && sizeof(UniqueId) == SFT_ID_BYTES);
static_assert(int{SUCCESS} == ncclSuccess && int{REMOTE_ERROR} == ncclRemoteError &&
              int{IN_PROGRESS} == ncclInProgress);
static_assert(SPLIT_NO_COLOUR == NCCL_SPLIT_NOCOLOR && INT_MIN == NCCL_CONFIG_UNDEF_INT);
#ifdef NCCL_SHRINK_ABORT
static_assert(SHRINK_ABORT == NCCL_SHRINK_ABORT);
#endif

#define SAME_PLACE(ours, theirs)                                              \
    static_assert(offsetof(Config, ours) == offsetof(ncclConfig_t, theirs) && \
                  std::is_same_v<decltype(Config::ours), std::remove_const_t<decltype(ncclConfig_t::theirs)>>)
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cga_cluster_size, cgaClusterSize);
SAME_PLACE(min_ctas, minCTAs);
SAME_PLACE(max_ctas, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
static_assert(sizeof(Config) <= sizeof(ncclConfig_t) && ncclConfig_t(NCCL_CONFIG_INITIALIZER).magic == Config().magic);

#define SAME_NUMBER(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))
SAME_NUMBER(SFT_INT8, ncclInt8);
SAME_NUMBER(SFT_UINT8, ncclUint8);
SAME_NUMBER(SFT_INT32, ncclInt32);
SAME_NUMBER(SFT_UINT32, ncclUint32);
SAME_NUMBER(SFT_INT64, ncclInt64);
SAME_NUMBER(SFT_UINT64, ncclUint64);
SAME_NUMBER(SFT_FLOAT16, ncclFloat16);
SAME_NUMBER(SFT_FLOAT32, ncclFloat32);
SAME_NUMBER(SFT_FLOAT64, ncclFloat64);
SAME_NUMBER(SFT_BFLOAT16, ncclBfloat16);
SAME_NUMBER(SFT_SUM, ncclSum);
SAME_NUMBER(SFT_PRODUCT, ncclProd);
SAME_NUMBER(SFT_MAX, ncclMax);
SAME_NUMBER(SFT_MIN, ncclMin);

// The same as seen by the machine: both pointers, or values of one size that are passed in one way.
template <class A, class B>
constexpr bool alike = (std::is_pointer_v<A> && std::is_pointer_v<B>) ||
                       (std::is_scalar_v<A> == std::is_scalar_v<B> && !std::is_pointer_v<A> && !std::is_pointer_v<B> &&
                        sizeof(A) == sizeof(B));

template <class A, class B>
struct Alike : std::false_type {};
template <class R, class... A, class S, class... B>
struct Alike<R(A...), S(B...)> {
    static constexpr bool count() {
        if constexpr (sizeof...(A) == sizeof...(B)) return (alike<A, B> && ...);
        return false;
    }
    static constexpr bool value = alike<R, S> && count();
};

#define CHECK(name, symbol) \
    static_assert(Alike<sft::nccl::name, std::remove_pointer_t<decltype(&::symbol)>>::value, #symbol);
SFT_NCCL_NEEDED(CHECK)
SFT_NCCL_OPTIONAL(CHECK)

}  // namespace
