// Collectives of processes of one host over shared memory, with NCCL's life cycle.
//
// Meeting: rank 0 makes a memfd and hands it to each rank that connects to an abstract Unix socket named after the
// group's token and belongs to the same user. Nothing is left in the file system, also after kill -9.
//
// Moving data: each rank has a seat with counters, and slots. A buffer goes through the slots in chunks: copy in,
// reduce one's own part of the chunk over all slots, copy the result out. Counters only grow (modulo 2^32); a wait is
// for all seats' counters to reach a number. While it waits, a rank looks every few milliseconds whether those it waits
// for are alive (pidfd: a zombie counts as dead, and children that inherited descriptors do not matter), have left or
// have aborted.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "support.h"

namespace sft {

using Token = std::array<uint8_t, 16>;

Token random_token();
// The same on every rank that passes the same arguments.
Token derived_token(const Token& parent, uint64_t first, uint64_t second);

class SharedGroup {
  public:
    SharedGroup(const Token& token, int rank, int ranks);
    ~SharedGroup();
    SharedGroup(const SharedGroup&) = delete;
    SharedGroup& operator=(const SharedGroup&) = delete;

    // These block, and are called by one thread.
    void join();
    void all_reduce(const void* send, void* receive, uint64_t count, int type, int reduction);
    void broadcast(void* buffer, uint64_t bytes, int root);
    struct Word {
        int64_t first, second;
    };
    std::vector<Word> exchange(Word mine);

    // From any thread: whoever blocks in this group, here or in a peer, gets an error.
    void abort() noexcept;
    // Peers that still wait for this rank get an error; what it has delivered stays valid.
    void leave() noexcept;

  private:
    struct Seat;
    struct Segment;
    using Counter = std::atomic<uint32_t> Seat::*;

    void offer();
    void fetch();
    void map(Fd fd);
    void hand_out(const Fd& segment, int client, std::vector<bool>& met);
    Fd reach_first();
    bool idle(int fd, short events, int milliseconds);
    Seat& seat(int rank) const;
    uint8_t* slot(int rank, uint32_t chunk) const;
    void advance(Counter counter, uint32_t value);
    void await(Counter counter, uint32_t value, int only = -1);
    void check_peers(Counter counter, uint32_t value, int only);
    bool reached(int rank, Counter counter, uint32_t value) const;
    bool dead(int rank);
    void ring() noexcept;
    void check_same_operation(uint64_t what);
    template <class Fill, class Work, class Drain>
    void pass_through(uint64_t what, uint64_t bytes, uint64_t chunk_bytes, Fill fill, Work work, Drain drain);

    const Token token_;
    const int rank_, ranks_;
    const uint64_t chunk_bytes_;
    uint32_t chunks_ = 0;  // passed through the slots so far
    uint64_t operations_ = 0;
    Fd wake_;  // readable once aborted
    std::atomic<bool> aborted_{false};
    std::atomic<uint8_t*> base_{nullptr};
    size_t mapped_ = 0;
    std::vector<Fd> pidfds_;
};

}  // namespace sft
