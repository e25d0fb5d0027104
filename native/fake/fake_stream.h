// What the fake driver and the fake collectives agree on: a stream is a count of what is under way on it.
#pragma once

#include <atomic>
#include <cstdint>

struct FakeStream {
    static constexpr uint32_t MAGIC = 0xfa4e57e4;
    uint32_t magic = MAGIC;
    std::atomic<int> pending{0};
};
