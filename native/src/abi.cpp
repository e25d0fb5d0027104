// The C face: checks arguments, keeps handles, and lets no exception out.
#include <algorithm>
#include <cerrno>
#include <exception>
#include <new>

#include "backend.h"

namespace {

using namespace sft;

constexpr int MOST_RANKS = 1 << 20;

struct LastError {
    int status = SFT_OK;
    char text[1024] = "";
};
thread_local LastError last_error;

int remember(int status, const char* text) noexcept {
    last_error.status = status;
    std::snprintf(last_error.text, sizeof last_error.text, "%s", text);
    return status;
}

template <class F>
int guarded(F&& body) noexcept {
    try {
        return body();
    } catch (const Error& error) {
        return remember(error.status, error.text.c_str());
    } catch (const std::bad_alloc&) {
        return remember(SFT_NO_MEMORY, "out of memory");
    } catch (const std::exception& error) {
        return remember(SFT_INTERNAL, error.what());
    } catch (...) {
        return remember(SFT_INTERNAL, "an unknown exception");
    }
}

// Never destroyed: at exit, and in forked children, other threads may still be about or be gone.
Table<Memory>& memories() {
    static auto& table = *new Table<Memory>;
    return table;
}
Table<Communicator>& communicators() {
    static auto& table = *new Table<Communicator>;
    return table;
}

void need(const void* pointer, const char* name) {
    if (pointer == nullptr) fail(SFT_INVALID, "%s is null", name);
}

void need_milliseconds(int milliseconds) {
    if (milliseconds < 0) fail(SFT_INVALID, "a time of %d ms", milliseconds);
}

void need_device(int device) {
    int count = backend().device_count();
    if (device < 0 || device >= count) fail(SFT_INVALID, "device %d of %d", device, count);
}

// An import or a create beyond this is a mistake of the caller, and its rounding would wrap around.
void need_size(uint64_t bytes) {
    if (bytes == 0) fail(SFT_INVALID, "memory of no bytes");
    if (bytes > (uint64_t{1} << 48)) fail(SFT_INVALID, "memory of %llu bytes", static_cast<unsigned long long>(bytes));
}

void need_range(const Memory& memory, uint64_t offset, uint64_t bytes) {
    uint64_t whole = memory.info().bytes;
    if (offset > whole || bytes > whole - offset)
        fail(SFT_INVALID, "%llu bytes at %llu do not lie in a memory of %llu bytes",
             static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(offset),
             static_cast<unsigned long long>(whole));
}

void need_elements(const void* buffer, uint64_t count, int type) {
    if (count > 0) need(buffer, "a buffer");
    if (count > (uint64_t{1} << 48) / type_size(type))
        fail(SFT_INVALID, "%llu elements", static_cast<unsigned long long>(count));
}

void copy_text(const std::string& from, char* text, size_t size) {
    need(text, "text");
    if (size == 0) fail(SFT_INVALID, "no room for text");
    std::snprintf(text, size, "%s", from.c_str());
}

}  // namespace

extern "C" {

int sft_abi(void) { return SFT_ABI; }

const char* sft_platform(void) { return backend().platform(); }

int sft_last_error(char* text, size_t size) {
    if (text != nullptr && size > 0) std::snprintf(text, size, "%s", last_error.text);
    return last_error.status;
}

int sft_open(void) {
    return guarded([] {
        backend().open();
        return SFT_OK;
    });
}

int sft_features(uint32_t* features) {
    return guarded([&] {
        need(features, "features");
        *features = backend().features();
        return SFT_OK;
    });
}

int sft_versions(int* driver, int* collectives) {
    return guarded([&] {
        need(driver, "driver");
        need(collectives, "collectives");
        backend().versions(*driver, *collectives);
        return SFT_OK;
    });
}

int sft_describe(char* text, size_t size) {
    return guarded([&] {
        copy_text(backend().describe(), text, size);
        return SFT_OK;
    });
}

int sft_device_count(int* count) {
    return guarded([&] {
        need(count, "count");
        *count = backend().device_count();
        return SFT_OK;
    });
}

int sft_device(int device, sft_device_info* info) {
    return guarded([&] {
        need(info, "info");
        need_device(device);
        *info = backend().device(device);
        return SFT_OK;
    });
}

int sft_device_free(int device, uint64_t* free_bytes, uint64_t* bytes) {
    return guarded([&] {
        need(free_bytes, "free_bytes");
        need(bytes, "bytes");
        need_device(device);
        backend().device_free(device, *free_bytes, *bytes);
        return SFT_OK;
    });
}

int sft_memory_create(int device, uint64_t bytes, uint32_t flags, uint64_t* memory) {
    return guarded([&] {
        need(memory, "memory");
        need_size(bytes);
        if ((flags & ~static_cast<uint32_t>(SFT_POPULATE)) != 0) fail(SFT_INVALID, "unknown flags %#x", flags);
        need_device(device);
        *memory = memories().put(backend().create(device, bytes, flags));
        return SFT_OK;
    });
}

int sft_memory_import(int device, int fd, uint64_t bytes, uint64_t* memory) {
    return guarded([&] {
        need(memory, "memory");
        need_size(bytes);
        need_device(device);
        *memory = memories().put(backend().import(device, fd, bytes));
        return SFT_OK;
    });
}

int sft_memory_export(uint64_t memory, int* fd) {
    return guarded([&] {
        need(fd, "fd");
        *fd = memories().get(memory)->export_fd().release();
        return SFT_OK;
    });
}

int sft_memory_info_of(uint64_t memory, sft_memory_info* info) {
    return guarded([&] {
        need(info, "info");
        *info = memories().get(memory)->info();
        return SFT_OK;
    });
}

int sft_memory_write(uint64_t memory, uint64_t offset, const void* source, uint64_t bytes) {
    return guarded([&] {
        auto object = memories().get(memory);
        need_range(*object, offset, bytes);
        if (bytes == 0) return SFT_OK;
        need(source, "source");
        object->write(offset, source, bytes);
        return SFT_OK;
    });
}

int sft_memory_read(uint64_t memory, uint64_t offset, void* target, uint64_t bytes) {
    return guarded([&] {
        auto object = memories().get(memory);
        need_range(*object, offset, bytes);
        if (bytes == 0) return SFT_OK;
        need(target, "target");
        object->read(offset, target, bytes);
        return SFT_OK;
    });
}

int sft_memory_flag(uint64_t memory, uint64_t offset, uint32_t value, uint64_t stream) {
    return guarded([&] {
        auto object = memories().get(memory);
        if (offset % sizeof(uint32_t) != 0) fail(SFT_INVALID, "a flag needs an offset that is a multiple of 4");
        need_range(*object, offset, sizeof(uint32_t));
        object->flag(offset, value, stream);
        return SFT_OK;
    });
}

int sft_memory_close(uint64_t memory) {
    return guarded([&] {
        memories().take(memory);
        return SFT_OK;
    });
}

int sft_dmabuf(int device, uint64_t address, uint64_t bytes, int* fd, uint64_t* offset, uint64_t* whole) {
    return guarded([&] {
        need(fd, "fd");
        need(offset, "offset");
        need(whole, "whole");
        need_device(device);
        *fd = backend().dmabuf(device, address, bytes, *offset, *whole).release();
        return SFT_OK;
    });
}

int sft_comm_id(uint8_t id[SFT_ID_BYTES]) {
    return guarded([&] {
        need(id, "id");
        backend().unique_id(id);
        return SFT_OK;
    });
}

int sft_comm_create(int device, const uint8_t id[SFT_ID_BYTES], int rank, int ranks, uint64_t* comm) {
    return guarded([&] {
        need(id, "id");
        need(comm, "comm");
        if (ranks < 1 || ranks > MOST_RANKS || rank < 0 || rank >= ranks)
            fail(SFT_INVALID, "rank %d of %d", rank, ranks);
        need_device(device);
        *comm = communicators().put(backend().join(device, id, rank, ranks));
        return SFT_OK;
    });
}

int sft_comm_state(uint64_t comm) {
    return guarded([&] { return communicators().get(comm)->state(); });
}

int sft_comm_wait(uint64_t comm, int milliseconds) {
    return guarded([&] {
        need_milliseconds(milliseconds);
        return communicators().get(comm)->wait(milliseconds);
    });
}

int sft_comm_all_reduce(uint64_t comm, const void* send, void* receive, uint64_t count, int type, int reduction,
                        uint64_t stream) {
    return guarded([&] {
        auto object = communicators().get(comm);
        need_elements(send, count, type);
        need_elements(receive, count, type);
        if (reduction < SFT_SUM || reduction > SFT_MIN) fail(SFT_INVALID, "%d is no reduction", reduction);
        object->all_reduce(send, receive, count, type, reduction, stream);
        return SFT_OK;
    });
}

int sft_comm_broadcast(uint64_t comm, void* buffer, uint64_t count, int type, int root, uint64_t stream) {
    return guarded([&] {
        auto object = communicators().get(comm);
        need_elements(buffer, count, type);
        if (root < 0 || root >= object->rank_count())
            fail(SFT_INVALID, "root %d of %d ranks", root, object->rank_count());
        object->broadcast(buffer, count, type, root, stream);
        return SFT_OK;
    });
}

int sft_comm_split(uint64_t comm, int colour, int key, uint64_t* child) {
    return guarded([&] {
        need(child, "child");
        if (colour < -1) fail(SFT_INVALID, "a colour of %d", colour);
        auto made = communicators().get(comm)->split(colour, key);
        *child = made ? communicators().put(std::move(made)) : 0;
        return SFT_OK;
    });
}

int sft_comm_shrink(uint64_t comm, const int* excluded, int count, uint64_t* child) {
    return guarded([&] {
        need(child, "child");
        auto object = communicators().get(comm);
        if (count < 1 || count >= object->rank_count())
            fail(SFT_INVALID, "%d excluded of %d ranks", count, object->rank_count());
        need(excluded, "excluded");
        std::vector<int> ranks(excluded, excluded + count);
        std::sort(ranks.begin(), ranks.end());
        bool twice = std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end();
        if (twice || ranks.front() < 0 || ranks.back() >= object->rank_count())
            fail(SFT_INVALID, "the excluded ranks are no set of ranks of this communicator");
        *child = communicators().put(object->shrink(ranks));
        return SFT_OK;
    });
}

int sft_comm_abort(uint64_t comm, int milliseconds) {
    return guarded([&] {
        need_milliseconds(milliseconds);
        communicators().get(comm)->abort(milliseconds);
        return SFT_OK;
    });
}

int sft_comm_close(uint64_t comm, int milliseconds) {
    return guarded([&] {
        need_milliseconds(milliseconds);
        communicators().take(comm)->close(milliseconds);
        return SFT_OK;
    });
}
}
