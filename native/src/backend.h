// What a backend has to provide. The C face (abi.cpp) is written once, over this.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support.h"

namespace sft {

class Memory {
  public:
    virtual ~Memory() = default;
    virtual sft_memory_info info() const = 0;
    virtual Fd export_fd() = 0;
    // Offsets and sizes were checked by the caller.
    virtual void write(uint64_t offset, const void* source, uint64_t bytes) = 0;
    virtual void read(uint64_t offset, void* target, uint64_t bytes) = 0;
    virtual void flag(uint64_t offset, uint32_t value, uint64_t stream) = 0;
};

class Communicator {
  public:
    virtual ~Communicator() = default;
    virtual int rank_count() const = 0;
    // SFT_OK or SFT_IN_PROGRESS; anything else is thrown.
    virtual int state() = 0;
    virtual int wait(int milliseconds) = 0;
    virtual void all_reduce(const void* send, void* receive, uint64_t count, int type, int reduction,
                            uint64_t stream) = 0;
    virtual void broadcast(void* buffer, uint64_t count, int type, int root, uint64_t stream) = 0;
    // Null for a colour of -1.
    virtual std::shared_ptr<Communicator> split(int colour, int key) = 0;
    // Ranks are sorted, unique, in range, and this one is not among them.
    virtual std::shared_ptr<Communicator> shrink(const std::vector<int>& excluded) = 0;
    virtual void abort(int milliseconds) = 0;
    virtual void close(int milliseconds) = 0;
};

class Backend {
  public:
    virtual ~Backend() = default;
    virtual const char* platform() const = 0;
    virtual void open() = 0;
    virtual uint32_t features() = 0;
    virtual void versions(int& driver, int& collectives) = 0;
    virtual std::string describe() = 0;
    virtual int device_count() = 0;
    virtual sft_device_info device(int device) = 0;
    virtual void device_free(int device, uint64_t& free_bytes, uint64_t& bytes) = 0;
    virtual std::shared_ptr<Memory> create(int device, uint64_t bytes, uint32_t flags) = 0;
    virtual std::shared_ptr<Memory> import(int device, int fd, uint64_t bytes) = 0;
    virtual Fd dmabuf(int device, uint64_t address, uint64_t bytes, uint64_t& offset, uint64_t& whole) = 0;
    virtual void unique_id(uint8_t* id) = 0;
    virtual std::shared_ptr<Communicator> join(int device, const uint8_t* id, int rank, int ranks) = 0;
};

// The one backend of this library.
Backend& backend();

}  // namespace sft
