#include "shared_group.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <type_traits>

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

namespace sft {

namespace {

constexpr uint32_t MAGIC = 0x53465431;
constexpr uint64_t CHUNK = 256 * 1024;
constexpr uint32_t SETS = 2;  // chunks under way at a time
constexpr int SPINS = 2000;
constexpr int YIELDS = 20;
constexpr long NAP_NANOSECONDS = 2'000'000;
constexpr int RETRY_MILLISECONDS = 2;
constexpr uint64_t LINE = 64;

enum SeatState : uint32_t { EMPTY = 0, SEATED = 1, LEFT = 2, ABORTED = 3 };

struct Hello {
    uint32_t magic;
    int32_t rank;
    int32_t ranks;
};

void futex_wake_all(std::atomic<uint32_t>* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void futex_wait(std::atomic<uint32_t>* word, uint32_t seen) {
    timespec nap{0, NAP_NANOSECONDS};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &nap, nullptr, 0);
}

socklen_t socket_address(const Token& token, sockaddr_un& address) {
    address = {};
    address.sun_family = AF_UNIX;
    int length = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "slurm-ft-native-");
    for (uint8_t byte : token) length += std::snprintf(address.sun_path + 1 + length, 3, "%02x", byte);
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
}

bool same_user(int fd) {
    ucred peer{};
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

bool send_fd(int to, int fd) {
    char byte = 1;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    return sendmsg(to, &message, MSG_NOSIGNAL) == 1;
}

Fd receive_fd(int from) {
    char byte = 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != 1) return Fd();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header == nullptr || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof(int))) return Fd();
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return Fd(fd);
}

// --- arithmetic ---

struct BFloat16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
    static BFloat16 from(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, sizeof wide);
        if (value != value) return {static_cast<uint16_t>((wide >> 16) | 0x40)};
        return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};  // to nearest, ties to even
    }
};

// Signed overflow wraps, as in NCCL, and is no undefined behaviour.
template <class T, int reduction>
T combine(T left, T right) {
    if constexpr (std::is_same_v<T, BFloat16>) {
        return BFloat16::from(combine<float, reduction>(left, right));
    } else if constexpr (std::is_integral_v<T> && (reduction == SFT_SUM || reduction == SFT_PRODUCT)) {
        using Wide = std::conditional_t<(sizeof(T) < sizeof(unsigned)), unsigned, std::make_unsigned_t<T>>;
        auto a = static_cast<Wide>(left), b = static_cast<Wide>(right);
        return static_cast<T>(reduction == SFT_SUM ? a + b : a * b);
    } else if constexpr (reduction == SFT_SUM) {
        return left + right;
    } else if constexpr (reduction == SFT_PRODUCT) {
        return left * right;
    } else if constexpr (reduction == SFT_MAX) {
        return left > right ? left : right;
    } else {
        return left < right ? left : right;
    }
}

template <class T, int reduction>
void reduce_as(uint8_t* into, const uint8_t* left, const uint8_t* right, uint64_t bytes) {
    auto* result = reinterpret_cast<T*>(into);
    auto* a = reinterpret_cast<const T*>(left);
    auto* b = reinterpret_cast<const T*>(right);
    for (uint64_t i = 0; i < bytes / sizeof(T); ++i) result[i] = combine<T, reduction>(a[i], b[i]);
}

using Reduce = void (*)(uint8_t*, const uint8_t*, const uint8_t*, uint64_t);

template <class T>
Reduce reduce_of(int reduction) {
    switch (reduction) {
        case SFT_SUM:
            return reduce_as<T, SFT_SUM>;
        case SFT_PRODUCT:
            return reduce_as<T, SFT_PRODUCT>;
        case SFT_MAX:
            return reduce_as<T, SFT_MAX>;
        default:
            return reduce_as<T, SFT_MIN>;
    }
}

Reduce reduce_of(int type, int reduction) {
    switch (type) {
        case SFT_INT8:
            return reduce_of<int8_t>(reduction);
        case SFT_UINT8:
            return reduce_of<uint8_t>(reduction);
        case SFT_INT32:
            return reduce_of<int32_t>(reduction);
        case SFT_UINT32:
            return reduce_of<uint32_t>(reduction);
        case SFT_INT64:
            return reduce_of<int64_t>(reduction);
        case SFT_UINT64:
            return reduce_of<uint64_t>(reduction);
        case SFT_FLOAT32:
            return reduce_of<float>(reduction);
        case SFT_FLOAT64:
            return reduce_of<double>(reduction);
        case SFT_BFLOAT16:
            return reduce_of<BFloat16>(reduction);
        default:
            fail(SFT_UNSUPPORTED, "the host backend does not reduce float16");
    }
}

uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
    return value ^ (value >> 31);
}

}  // namespace

Token random_token() {
    Token token;
    if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) fail_system(errno, "getrandom");
    return token;
}

Token derived_token(const Token& parent, uint64_t first, uint64_t second) {
    uint64_t halves[2];
    std::memcpy(halves, parent.data(), sizeof halves);
    uint64_t low = mix(halves[0] ^ mix(first + 0x9e3779b97f4a7c15ULL));
    uint64_t high = mix(halves[1] ^ mix(second + low));
    halves[0] = mix(low ^ high);
    halves[1] = high;
    Token token;
    std::memcpy(token.data(), halves, sizeof halves);
    return token;
}

// --- the segment ---

struct alignas(LINE) SharedGroup::Seat {
    std::atomic<uint32_t> state;
    std::atomic<int32_t> pid;
    std::atomic<uint32_t> seated;  // 1 once pid is valid
    std::atomic<uint64_t> what;    // the operation it is in: all ranks must be in the same
    int64_t words[2];
    alignas(LINE) std::atomic<uint32_t> arrived;  // chunks copied in
    std::atomic<uint32_t> reduced;                // chunks whose own part is reduced
    std::atomic<uint32_t> done;                   // chunks copied out
};

struct alignas(LINE) SharedGroup::Segment {
    uint32_t magic;
    int32_t ranks;
    alignas(LINE) std::atomic<uint32_t> bell;  // grows whenever anything above a seat changes
    std::atomic<uint32_t> sleepers;
};

SharedGroup::SharedGroup(const Token& token, int rank, int ranks)
    : token_(token), rank_(rank), ranks_(ranks), chunk_bytes_(CHUNK), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (wake_.get() < 0) fail_system(errno, "eventfd");
    static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);
    // Slots of all ranks, and one more for the result.
    mapped_ =
        sizeof(Segment) + sizeof(Seat) * static_cast<size_t>(ranks) + SETS * CHUNK * static_cast<size_t>(ranks + 1);
    pidfds_.resize(static_cast<size_t>(ranks));
}

SharedGroup::~SharedGroup() {
    leave();
    if (uint8_t* base = base_.exchange(nullptr)) munmap(base, mapped_);
}

SharedGroup::Seat& SharedGroup::seat(int rank) const {
    return reinterpret_cast<Seat*>(base_.load(std::memory_order_relaxed) + sizeof(Segment))[rank];
}

uint8_t* SharedGroup::slot(int rank, uint32_t chunk) const {
    uint8_t* first =
        base_.load(std::memory_order_relaxed) + sizeof(Segment) + sizeof(Seat) * static_cast<size_t>(ranks_);
    return first + (static_cast<size_t>(rank) * SETS + chunk % SETS) * CHUNK;
}

void SharedGroup::ring() noexcept {
    auto* segment = reinterpret_cast<Segment*>(base_.load());
    segment->bell.fetch_add(1);
    if (segment->sleepers.load() > 0) futex_wake_all(&segment->bell);
}

void SharedGroup::abort() noexcept {
    aborted_.store(true);
    uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof one);
    if (base_.load() == nullptr) return;
    seat(rank_).state.store(ABORTED);
    ring();
}

void SharedGroup::leave() noexcept {
    if (base_.load() == nullptr) return;
    uint32_t seated = SEATED;
    if (seat(rank_).state.compare_exchange_strong(seated, LEFT)) ring();
}

// --- meeting ---

// Waits on fd, and throws once aborted.
bool SharedGroup::idle(int fd, short events, int milliseconds) {
    pollfd watched[2] = {{wake_.get(), POLLIN, 0}, {fd, events, 0}};
    int count = poll(watched, fd >= 0 ? 2 : 1, milliseconds);
    if (aborted_.load()) fail(SFT_ABORTED, "the communicator was aborted");
    return count > 0 && fd >= 0 && watched[1].revents != 0;
}

void SharedGroup::map(Fd fd) {
    void* base = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (base == MAP_FAILED) fail_system(errno, "mmap of the group's memory");
    base_.store(static_cast<uint8_t*>(base));
}

void SharedGroup::hand_out(const Fd& segment, int client, std::vector<bool>& met) {
    Hello hello{};
    if (!same_user(client) || recv(client, &hello, sizeof hello, MSG_DONTWAIT) != sizeof hello) return;
    if (hello.magic != MAGIC || hello.ranks != ranks_ || hello.rank <= 0 || hello.rank >= ranks_)
        fail(SFT_INVALID, "a process came as rank %d of %d, this group has %d", hello.rank, hello.ranks, ranks_);
    if (met[static_cast<size_t>(hello.rank)]) fail(SFT_INVALID, "two processes came as rank %d", hello.rank);
    if (send_fd(client, segment.get())) met[static_cast<size_t>(hello.rank)] = true;
}

void SharedGroup::offer() {
    Fd memory(static_cast<int>(syscall(SYS_memfd_create, "slurm-ft-group", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
    if (memory.get() < 0) fail_system(errno, "memfd_create");
    if (ftruncate(memory.get(), static_cast<off_t>(mapped_)) != 0) fail_system(errno, "ftruncate");
    fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    map(Fd(fcntl(memory.get(), F_DUPFD_CLOEXEC, 0)));
    auto* segment = reinterpret_cast<Segment*>(base_.load());
    segment->magic = MAGIC;
    segment->ranks = ranks_;
    if (ranks_ == 1) return;

    Fd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (listener.get() < 0) fail_system(errno, "socket");
    sockaddr_un address;
    socklen_t length = socket_address(token_, address);
    if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
        if (errno == EADDRINUSE) fail(SFT_INVALID, "two processes came as rank 0, or the id was used before");
        fail_system(errno, "bind of the group's socket");
    }
    if (listen(listener.get(), std::min(ranks_, 4096)) != 0) fail_system(errno, "listen");

    std::vector<bool> met(static_cast<size_t>(ranks_), false);
    std::vector<Fd> clients;  // connected, hello not yet read
    for (int missing = ranks_ - 1; missing > 0;) {
        // A client that connects but says nothing must not hold up the others.
        if (idle(listener.get(), POLLIN, clients.empty() ? 100 : RETRY_MILLISECONDS)) {
            Fd client(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
            if (client.get() >= 0) clients.push_back(std::move(client));
        }
        for (size_t i = 0; i < clients.size();) {
            pollfd ready{clients[i].get(), POLLIN, 0};
            if (poll(&ready, 1, 0) == 0) {
                ++i;
                continue;
            }
            hand_out(memory, clients[i].get(), met);
            clients.erase(clients.begin() + static_cast<std::ptrdiff_t>(i));
        }
        missing = ranks_ - 1 - static_cast<int>(std::count(met.begin(), met.end(), true));
        for (int rank = 1; rank < ranks_; ++rank)
            if (met[static_cast<size_t>(rank)] && seat(rank).state.load() > SEATED)
                fail(SFT_REMOTE, "rank %d left before the group was complete", rank);
    }
}

Fd SharedGroup::reach_first() {
    sockaddr_un address;
    socklen_t length = socket_address(token_, address);
    for (;;) {
        Fd server(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
        if (server.get() < 0) fail_system(errno, "socket");
        Hello hello{MAGIC, rank_, ranks_};
        if (connect(server.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 && same_user(server.get()) &&
            send(server.get(), &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello)
            return server;
        idle(-1, 0, RETRY_MILLISECONDS);
    }
}

void SharedGroup::fetch() {
    for (;;) {
        Fd server = reach_first();
        while (!idle(server.get(), POLLIN, 100)) {
        }
        Fd memory = receive_fd(server.get());
        if (memory.get() < 0) fail(SFT_REMOTE, "rank 0 gave up or refused this rank");
        struct stat facts{};
        if (fstat(memory.get(), &facts) != 0 || facts.st_size != static_cast<off_t>(mapped_))
            fail(SFT_REMOTE, "rank 0 sent memory of another size");
        map(std::move(memory));
        return;
    }
}

void SharedGroup::join() {
    rank_ == 0 ? offer() : fetch();
    seat(rank_).pid.store(getpid());
    seat(rank_).state.store(SEATED);
    if (aborted_.load()) seat(rank_).state.store(ABORTED);
    advance(&Seat::seated, 1);
    await(&Seat::seated, 1);
}

// --- waiting ---

bool SharedGroup::reached(int rank, Counter counter, uint32_t value) const {
    return static_cast<int32_t>((seat(rank).*counter).load(std::memory_order_acquire) - value) >= 0;
}

void SharedGroup::advance(Counter counter, uint32_t value) {
    (seat(rank_).*counter).store(value);
    ring();
}

bool SharedGroup::dead(int rank) {
    int pid = seat(rank).pid.load();
    if (pid == 0) return false;
    Fd& fd = pidfds_[static_cast<size_t>(rank)];
    if (fd.get() < 0) {
        fd = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
        if (fd.get() < 0) return errno == ESRCH;
        fcntl(fd.get(), F_SETFD, FD_CLOEXEC);
    }
    pollfd ended{fd.get(), POLLIN, 0};
    return poll(&ended, 1, 0) > 0;
}

void SharedGroup::check_peers(Counter counter, uint32_t value, int only) {
    if (aborted_.load()) fail(SFT_ABORTED, "the communicator was aborted");
    int culprit = -1;
    const char* how = "";
    for (int rank = 0; rank < ranks_; ++rank) {
        if (rank == rank_ || (only >= 0 && rank != only) || reached(rank, counter, value)) continue;
        uint32_t state = seat(rank).state.load();
        bool gone = dead(rank);
        // It may have delivered what is waited for as its last act.
        if ((state <= SEATED && !gone) || reached(rank, counter, value)) continue;
        if (culprit >= 0 && !gone) continue;
        culprit = rank;
        how = gone ? "died" : state == LEFT ? "has left" : "has aborted";
        if (gone) break;  // whoever aborted did so because of this one
    }
    if (culprit >= 0) fail(SFT_REMOTE, "rank %d (process %d) %s", culprit, seat(culprit).pid.load(), how);
}

void SharedGroup::await(Counter counter, uint32_t value, int only) {
    auto* segment = reinterpret_cast<Segment*>(base_.load());
    auto ready = [&] {
        if (only >= 0) return reached(only, counter, value);
        for (int rank = 0; rank < ranks_; ++rank)
            if (!reached(rank, counter, value)) return false;
        return true;
    };
    if (aborted_.load()) fail(SFT_ABORTED, "the communicator was aborted");
    for (int i = 0; i < SPINS; ++i) {
        if (ready()) return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    for (int i = 0; i < YIELDS; ++i) {
        if (ready()) return;
        sched_yield();
    }
    for (;;) {
        uint32_t seen = segment->bell.load();
        segment->sleepers.fetch_add(1);
        bool is_ready = ready();
        if (!is_ready && !aborted_.load()) futex_wait(&segment->bell, seen);
        segment->sleepers.fetch_sub(1);
        if (is_ready || ready()) return;
        check_peers(counter, value, only);
    }
}

// --- moving data ---

void SharedGroup::check_same_operation(uint64_t what) {
    for (int rank = 0; rank < ranks_; ++rank)
        if (seat(rank).what.load() != what)
            fail(SFT_INVALID, "rank %d is in another operation than rank %d, or in one of another size", rank, rank_);
}

template <class Fill, class Work, class Drain>
void SharedGroup::pass_through(uint64_t what, uint64_t bytes, uint64_t chunk_bytes, Fill fill, Work work, Drain drain) {
    // The number of the operation is in it: a rank that skipped one is noticed.
    what = mix(what ^ mix(++operations_));
    const auto count = static_cast<uint32_t>(bytes == 0 ? 1 : (bytes + chunk_bytes - 1) / chunk_bytes);
    const uint32_t first = chunks_;
    auto size = [&](uint32_t i) { return std::min(chunk_bytes, bytes - chunk_bytes * i); };
    auto put = [&](uint32_t i) {
        await(&Seat::done, first + i + 1 - SETS);  // the slot's last content was taken by all
        fill(slot(rank_, first + i), chunk_bytes * i, size(i));
        advance(&Seat::arrived, first + i + 1);
    };
    seat(rank_).what.store(what);
    put(0);
    for (uint32_t i = 0; i < count; ++i) {
        if (i + 1 < count) put(i + 1);
        await(&Seat::arrived, first + i + 1);
        if (i == 0) check_same_operation(what);
        work(first + i, size(i));
        advance(&Seat::reduced, first + i + 1);
        await(&Seat::reduced, first + i + 1);
        drain(first + i, chunk_bytes * i, size(i));
        advance(&Seat::done, first + i + 1);
    }
    chunks_ = first + count;
}

void SharedGroup::all_reduce(const void* send, void* receive, uint64_t count, int type, int reduction) {
    Reduce reduce = reduce_of(type, reduction);
    const auto* from = static_cast<const uint8_t*>(send);
    auto* to = static_cast<uint8_t*>(receive);
    const uint64_t bytes = count * type_size(type);
    if (ranks_ == 1) {
        if (bytes > 0 && from != to) std::memmove(to, from, bytes);
        return;
    }
    auto fill = [&](uint8_t* slot, uint64_t offset, uint64_t size) {
        if (size > 0) std::memcpy(slot, from + offset, size);
    };
    // Each rank reduces its part of the chunk, so all ranks get the same bits.
    auto work = [&](uint32_t chunk, uint64_t size) {
        uint64_t lines = (size + LINE - 1) / LINE, all = static_cast<uint64_t>(ranks_),
                 me = static_cast<uint64_t>(rank_);
        uint64_t start = std::min(size, lines * me / all * LINE), end = std::min(size, lines * (me + 1) / all * LINE);
        if (start == end) return;
        uint8_t* result = slot(ranks_, chunk) + start;
        reduce(result, slot(0, chunk) + start, slot(1, chunk) + start, end - start);
        for (int rank = 2; rank < ranks_; ++rank) reduce(result, result, slot(rank, chunk) + start, end - start);
    };
    auto drain = [&](uint32_t chunk, uint64_t offset, uint64_t size) {
        if (size > 0) std::memcpy(to + offset, slot(ranks_, chunk), size);
    };
    pass_through(mix(count) + static_cast<uint64_t>(type * 16 + reduction + 1), bytes, chunk_bytes_, fill, work, drain);
}

void SharedGroup::broadcast(void* buffer, uint64_t bytes, int root) {
    if (ranks_ == 1) return;
    auto* data = static_cast<uint8_t*>(buffer);
    auto fill = [&](uint8_t* slot, uint64_t offset, uint64_t size) {
        if (size > 0 && rank_ == root) std::memcpy(slot, data + offset, size);
    };
    auto drain = [&](uint32_t chunk, uint64_t offset, uint64_t size) {
        if (size > 0 && rank_ != root) std::memcpy(data + offset, slot(root, chunk), size);
    };
    auto nothing = [](uint32_t, uint64_t) {};
    pass_through(mix(bytes) + 1000 + static_cast<uint64_t>(root), bytes, chunk_bytes_, fill, nothing, drain);
}

std::vector<SharedGroup::Word> SharedGroup::exchange(Word mine) {
    std::vector<Word> all(static_cast<size_t>(ranks_), mine);
    if (ranks_ == 1) return all;
    auto fill = [&](uint8_t*, uint64_t, uint64_t) {
        seat(rank_).words[0] = mine.first;
        seat(rank_).words[1] = mine.second;
    };
    auto drain = [&](uint32_t, uint64_t, uint64_t) {
        for (int rank = 0; rank < ranks_; ++rank)
            all[static_cast<size_t>(rank)] = {seat(rank).words[0], seat(rank).words[1]};
    };
    // A rank writes its words again only after all have read them: two exchanges in a row must not overlap.
    await(&Seat::done, chunks_);
    pass_through(500, 0, chunk_bytes_, fill, [](uint32_t, uint64_t) {}, drain);
    return all;
}

}  // namespace sft
