// Calls the C face with random arguments, and must neither crash nor leak: run under sanitizers by tests/native.
//
//   fuzz SEED ROUNDS
// Pointers are good or null, since no library can check others; everything else may be anything.
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "slurm_ft_native.h"

namespace {

constexpr size_t BUFFER = 1 << 16;
constexpr size_t MOST_OBJECTS = 12;

std::mt19937_64 dice;
std::vector<uint64_t> memories, comms;
std::vector<int> fds;
std::vector<std::vector<uint8_t>> ids;
alignas(64) uint8_t buffer[BUFFER];

uint64_t below(uint64_t count) { return dice() % count; }
bool rarely() { return below(8) == 0; }

int odd_int() {
    const int odd[] = {0, 1, -1, 2, 3, 7, 64, INT_MAX, INT_MIN, -2};
    return odd[below(std::size(odd))];
}

uint64_t odd_number() {
    const uint64_t odd[] = {
        0, 1, 2, 3, 4, 100, 4095, 4096, 65536, BUFFER, BUFFER + 1, uint64_t{1} << 47, UINT64_MAX, 1ULL << 63};
    return odd[below(std::size(odd))];
}

uint64_t some(const std::vector<uint64_t>& handles) {
    return handles.empty() || rarely() ? below(50) * (rarely() ? UINT64_MAX / 50 : 1) : handles[below(handles.size())];
}

template <class T>
T* maybe(T* pointer) {
    return below(16) == 0 ? nullptr : pointer;
}

int device() { return rarely() ? odd_int() : 0; }

void forget(std::vector<uint64_t>& handles, uint64_t handle) {
    for (size_t i = 0; i < handles.size(); ++i)
        if (handles[i] == handle) handles.erase(handles.begin() + static_cast<std::ptrdiff_t>(i--));
}

void memory_call() {
    uint64_t handle = some(memories), made = 0, size = rarely() ? odd_number() : 1 + below(BUFFER);
    sft_memory_info info;
    int fd = -1;
    uint64_t offset = rarely() ? odd_number() : below(BUFFER), whole = 0;
    switch (below(10)) {
        case 0:
        case 1:
            if (memories.size() < MOST_OBJECTS &&
                sft_memory_create(device(), size, rarely() ? 7 : 0, maybe(&made)) == SFT_OK)
                memories.push_back(made);
            break;
        case 2:
            if (sft_memory_export(handle, maybe(&fd)) == SFT_OK) fds.push_back(fd);
            break;
        case 3:
            fd = fds.empty() || rarely() ? odd_int() : fds[below(fds.size())];
            if (memories.size() < MOST_OBJECTS && sft_memory_import(device(), fd, size, maybe(&made)) == SFT_OK)
                memories.push_back(made);
            break;
        case 4:
            sft_memory_info_of(handle, maybe(&info));
            break;
        case 5:
            sft_memory_write(handle, offset, maybe(buffer), size <= BUFFER ? size : size | (uint64_t{1} << 60));
            break;
        case 6:
            sft_memory_read(handle, offset, maybe(buffer), size <= BUFFER ? size : size | (uint64_t{1} << 60));
            break;
        case 7:
            sft_memory_flag(handle, offset, static_cast<uint32_t>(dice()), 0);
            break;
        case 8:
            if (sft_memory_close(handle) == SFT_OK) forget(memories, handle);
            break;
        case 9:
            if (sft_memory_info_of(handle, &info) == SFT_OK &&
                sft_dmabuf(device(), info.address, size, maybe(&fd), maybe(&offset), maybe(&whole)) == SFT_OK)
                close(fd);
            break;
    }
    while (fds.size() > MOST_OBJECTS) {
        close(fds.back());
        fds.pop_back();
    }
}

void comm_call() {
    uint64_t handle = some(comms), made = 0;
    uint64_t count = rarely() ? odd_number() : below(BUFFER / 8);
    // A count that is not refused must fit in the buffer.
    if (count > BUFFER / 8) count |= uint64_t{1} << 60;
    int type = rarely() ? odd_int() : static_cast<int>(below(10));
    std::vector<uint8_t> id(SFT_ID_BYTES);
    int list[3] = {static_cast<int>(below(4)), static_cast<int>(below(4)) - 1, odd_int()};
    switch (below(11)) {
        case 0:
            if (sft_comm_id(maybe(id.data())) == SFT_OK) ids.push_back(id);
            break;
        case 1:
        case 2: {
            if (comms.size() >= MOST_OBJECTS) break;
            if (!ids.empty() && !rarely()) id = ids[below(ids.size())];
            int rank = rarely() ? odd_int() : static_cast<int>(below(2)),
                ranks = rarely() ? odd_int() : 1 + static_cast<int>(below(2));
            if (ranks > 100) ranks = INT_MAX;
            if (sft_comm_create(device(), maybe(id.data()), rank, ranks, maybe(&made)) == SFT_OK) comms.push_back(made);
            break;
        }
        case 3:
            sft_comm_state(handle);
            break;
        case 4:
            sft_comm_wait(handle, rarely() ? -1 : static_cast<int>(below(3)));
            break;
        case 5:
        case 6:
            sft_comm_all_reduce(handle, maybe(buffer), maybe(buffer), count, type,
                                rarely() ? odd_int() : static_cast<int>(below(4)), 0);
            break;
        case 7:
            sft_comm_broadcast(handle, maybe(buffer), count, type, rarely() ? odd_int() : 0, 0);
            break;
        case 8:
            if (comms.size() < MOST_OBJECTS && sft_comm_split(handle, list[1], odd_int(), maybe(&made)) == SFT_OK &&
                made != 0)
                comms.push_back(made);
            break;
        case 9:
            if (comms.size() < MOST_OBJECTS &&
                sft_comm_shrink(handle, maybe(list), rarely() ? odd_int() : 1, maybe(&made)) == SFT_OK)
                comms.push_back(made);
            break;
        case 10:
            if (below(2) == 0) sft_comm_abort(handle, 1000);
            if (sft_comm_close(handle, static_cast<int>(below(3))) != SFT_BAD_HANDLE) forget(comms, handle);
            break;
    }
}

void other_call() {
    char text[64];
    uint32_t features;
    int number, other;
    uint64_t size, free_bytes;
    sft_device_info info;
    switch (below(7)) {
        case 0:
            sft_last_error(maybe(text), below(sizeof text));
            break;
        case 1:
            sft_features(maybe(&features));
            break;
        case 2:
            sft_versions(maybe(&number), maybe(&other));
            break;
        case 3:
            sft_describe(maybe(text), below(sizeof text));
            break;
        case 4:
            sft_device(device(), maybe(&info));
            break;
        case 5:
            sft_device_free(device(), maybe(&free_bytes), maybe(&size));
            break;
        case 6:
            sft_open();
            break;
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) return 2;
    dice.seed(std::strtoull(arguments[1], nullptr, 10));
    if (sft_open() != SFT_OK) {
        char text[512];
        sft_last_error(text, sizeof text);
        std::fprintf(stderr, "%s\n", text);
        return 1;
    }
    for (long round = std::atol(arguments[2]); round > 0; --round) {
        switch (below(5)) {
            case 0:
                other_call();
                break;
            case 1:
            case 2:
                memory_call();
                break;
            default:
                comm_call();
        }
    }
    for (uint64_t handle : memories) sft_memory_close(handle);
    for (uint64_t handle : comms) sft_comm_close(handle, 0);
    for (int fd : fds) close(fd);
    std::puts("fine");
    return 0;
}
