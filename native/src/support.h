// What all backends share: errors, file descriptors, handles.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include <unistd.h>

#include "slurm_ft_native.h"

namespace sft {

// Thrown inside the library only; the C face turns it into a status and a sentence.
struct Error {
    int status;
    std::string text;
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(int status, const char* format, ...) {
    char text[768];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    throw Error{status, text};
}

[[noreturn]] inline void fail_system(int error, const char* what) {
    fail(error == ENOMEM || error == ENOSPC ? SFT_NO_MEMORY : SFT_SYSTEM, "%s: %s", what, std::strerror(error));
}

// Owns one file descriptor.
class Fd {
  public:
    explicit Fd(int fd = -1) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Fd() {
        if (fd_ >= 0) ::close(fd_);
    }
    int get() const { return fd_; }
    int release() { return std::exchange(fd_, -1); }

  private:
    int fd_;
};

// Handles given to the caller. A number is never used twice, so an old one is noticed. An object that is in use in
// another thread lives until that thread is done with it.
template <class T>
class Table {
  public:
    uint64_t put(std::shared_ptr<T> object) {
        std::lock_guard<std::mutex> lock(mutex_);
        objects_.emplace(++last_, std::move(object));
        return last_;
    }
    std::shared_ptr<T> get(uint64_t handle) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = objects_.find(handle);
        if (found == objects_.end()) missing(handle);
        return found->second;
    }
    std::shared_ptr<T> take(uint64_t handle) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = objects_.find(handle);
        if (found == objects_.end()) missing(handle);
        auto object = std::move(found->second);
        objects_.erase(found);
        return object;
    }

  private:
    [[noreturn]] void missing(uint64_t handle) {
        bool closed = handle != 0 && handle <= last_;
        fail(SFT_BAD_HANDLE, "handle %llu %s", static_cast<unsigned long long>(handle),
             closed ? "is closed already" : "was never given out");
    }

    std::mutex mutex_;
    std::unordered_map<uint64_t, std::shared_ptr<T>> objects_;
    uint64_t last_ = 0;
};

inline size_t type_size(int type) {
    switch (type) {
        case SFT_INT8:
        case SFT_UINT8:
            return 1;
        case SFT_FLOAT16:
        case SFT_BFLOAT16:
            return 2;
        case SFT_INT32:
        case SFT_UINT32:
        case SFT_FLOAT32:
            return 4;
        case SFT_INT64:
        case SFT_UINT64:
        case SFT_FLOAT64:
            return 8;
        default:
            fail(SFT_INVALID, "%d is no element type", type);
    }
}

}  // namespace sft
