// The host backend: memfd memory, and shared-memory collectives run by one thread per communicator.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>

#include "backend.h"
#include "shared_group.h"

namespace sft {

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint8_t ID_MARK[8] = {'s', 'l', 'u', 'r', 'm', '-', 'f', 't'};

class HostMemory : public Memory {
  public:
    HostMemory(Fd fd, uint64_t bytes, uint64_t mapped, bool imported)
        : fd_(std::move(fd)), bytes_(bytes), mapped_(mapped), imported_(imported) {
        void* address = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
        if (address == MAP_FAILED) fail_system(errno, "mmap");
        address_ = static_cast<uint8_t*>(address);
    }
    ~HostMemory() override { munmap(address_, mapped_); }

    sft_memory_info info() const override {
        return {reinterpret_cast<uint64_t>(address_), bytes_, mapped_, 0, imported_ ? 1 : 0};
    }
    Fd export_fd() override {
        Fd copy(fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
        if (copy.get() < 0) fail_system(errno, "dup of the memory's descriptor");
        return copy;
    }
    void write(uint64_t offset, const void* source, uint64_t bytes) override {
        std::memcpy(address_ + offset, source, bytes);
    }
    void read(uint64_t offset, void* target, uint64_t bytes) override { std::memcpy(target, address_ + offset, bytes); }
    void flag(uint64_t offset, uint32_t value, uint64_t) override {
        __atomic_store_n(reinterpret_cast<uint32_t*>(address_ + offset), value, __ATOMIC_SEQ_CST);
    }

  private:
    Fd fd_;
    uint64_t bytes_, mapped_;
    bool imported_;
    uint8_t* address_;
};

// Where a communicator takes its seat; for a split it is known only after the parent's ranks have spoken.
struct Place {
    Token token;
    int rank, ranks;
};

// What a split of the parent hands to the child's thread.
struct Promise {
    std::mutex mutex;
    bool kept = false;
    Place place{};
    Error error{SFT_OK, ""};

    void keep(const Place& value) {
        std::lock_guard<std::mutex> lock(mutex);
        place = value;
        kept = true;
    }
    void fail(const Error& value) {
        std::lock_guard<std::mutex> lock(mutex);
        error = value;
        kept = true;
    }
};

class HostCommunicator : public Communicator {
  public:
    explicit HostCommunicator(const Place& place) : place_(place), shared_(std::make_shared<Shared>()) {
        start([place](Shared&) { return place; });
    }
    HostCommunicator(std::shared_ptr<Promise> promise, int ranks)
        : place_{{}, 0, ranks}, shared_(std::make_shared<Shared>()) {
        start([promise](Shared& shared) {
            for (;;) {
                {
                    std::lock_guard<std::mutex> lock(promise->mutex);
                    if (promise->error.status != SFT_OK) throw promise->error;
                    if (promise->kept) return promise->place;
                }
                std::unique_lock<std::mutex> lock(shared.mutex);
                shared.changed.wait_for(lock, std::chrono::milliseconds(1));
                if (shared.stop) fail(SFT_ABORTED, "the communicator was aborted");
            }
        });
    }
    ~HostCommunicator() override { finish(0); }

    int rank_count() const override {
        std::lock_guard<std::mutex> lock(shared_->mutex);
        return shared_->group ? shared_->place.ranks : place_.ranks;
    }

    int state() override {
        std::lock_guard<std::mutex> lock(shared_->mutex);
        return shared_->state();
    }

    int wait(int milliseconds) override {
        std::unique_lock<std::mutex> lock(shared_->mutex);
        auto settled = [&] { return shared_->error.status != SFT_OK || shared_->pending == 0; };
        if (!shared_->changed.wait_for(lock, std::chrono::milliseconds(milliseconds), settled))
            fail(SFT_TIMEOUT, "not finished within %d ms", milliseconds);
        return shared_->state();
    }

    void all_reduce(const void* send, void* receive, uint64_t count, int type, int reduction, uint64_t) override {
        if (type == SFT_FLOAT16) fail(SFT_UNSUPPORTED, "the host backend does not reduce float16");
        enqueue([=](SharedGroup& group) { group.all_reduce(send, receive, count, type, reduction); });
    }

    void broadcast(void* buffer, uint64_t count, int type, int root, uint64_t) override {
        uint64_t bytes = count * type_size(type);
        enqueue([=](SharedGroup& group) { group.broadcast(buffer, bytes, root); });
    }

    std::shared_ptr<Communicator> split(int colour, int key) override {
        auto promise = std::make_shared<Promise>();
        Place parent = joined_place();
        uint64_t number;
        {
            std::lock_guard<std::mutex> lock(shared_->mutex);
            number = ++shared_->children;
        }
        enqueue(
            [=](SharedGroup& group) {
                try {
                    promise->keep(place_in(group.exchange({colour, key}), parent, number, colour));
                } catch (const Error& error) {
                    promise->fail(error);
                    throw;
                }
            },
            promise);
        if (colour < 0) return nullptr;
        return std::make_shared<HostCommunicator>(promise, parent.ranks);
    }

    std::shared_ptr<Communicator> shrink(const std::vector<int>& excluded) override {
        Place parent = joined_place();
        if (std::binary_search(excluded.begin(), excluded.end(), parent.rank))
            fail(SFT_INVALID, "rank %d excludes itself", parent.rank);
        std::lock_guard<std::mutex> lock(shared_->mutex);
        if (shared_->error.status == SFT_ABORTED) fail(SFT_ABORTED, "the communicator was aborted");
        uint64_t list = 0;
        for (int rank : excluded) list = list * 1000003 + static_cast<uint64_t>(rank) + 1;
        auto below = std::lower_bound(excluded.begin(), excluded.end(), parent.rank) - excluded.begin();
        Place place{derived_token(parent.token, (uint64_t{1} << 62) + ++shared_->shrinks, list),
                    parent.rank - static_cast<int>(below), parent.ranks - static_cast<int>(excluded.size())};
        return std::make_shared<HostCommunicator>(place);
    }

    // Once it returns, nothing here touches a buffer any more.
    void abort(int milliseconds) override {
        stop({SFT_ABORTED, "the communicator was aborted"});
        std::unique_lock<std::mutex> lock(shared_->mutex);
        shared_->changed.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return shared_->ended; });
    }

    void close(int milliseconds) override { finish(milliseconds); }

  private:
    using Task = std::function<void(SharedGroup&)>;
    struct Item {
        Task run;
        std::shared_ptr<Promise> promise;  // of a split, broken when the item is never run
    };

    // All that the thread touches: it outlives the communicator in a forked child, where there is no such thread.
    struct Shared {
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<Item> queue;
        int pending = 1;  // joining, then the queue and what runs
        bool stop = false, joined = false, ended = false;
        Error error{SFT_OK, ""};
        Place place{};
        std::unique_ptr<SharedGroup> group;
        uint64_t children = 0, shrinks = 0;

        int state() const {
            if (error.status != SFT_OK) throw error;
            return pending > 0 ? SFT_IN_PROGRESS : SFT_OK;
        }
        // Peers that wait for this rank are told, and need not wait for their own time-outs.
        void broken(const Error& why) {
            std::lock_guard<std::mutex> lock(mutex);
            poison(why);
            if (group) group->abort();
        }
        // With the mutex held.
        void poison(const Error& why) {
            if (error.status == SFT_OK) error = why;
            for (Item& item : queue)
                if (item.promise) item.promise->fail(why);
            queue.clear();
            pending = 0;
            changed.notify_all();
        }
    };

    static Place place_in(const std::vector<SharedGroup::Word>& words, const Place& parent, uint64_t number,
                          int colour) {
        int rank = 0, ranks = 0;
        const auto& mine = words[static_cast<size_t>(parent.rank)];
        for (int other = 0; other < parent.ranks; ++other) {
            const auto& word = words[static_cast<size_t>(other)];
            if (word.first != colour) continue;
            ++ranks;
            if (word.second < mine.second || (word.second == mine.second && other < parent.rank)) ++rank;
        }
        return {derived_token(parent.token, number, static_cast<uint64_t>(colour)), rank, ranks};
    }

    Place joined_place() {
        std::lock_guard<std::mutex> lock(shared_->mutex);
        if (!shared_->group) {
            shared_->state();
            fail(SFT_INVALID, "the communicator is still being set up: wait for it first");
        }
        return shared_->place;
    }

    void enqueue(Task task, std::shared_ptr<Promise> promise = nullptr) {
        std::lock_guard<std::mutex> lock(shared_->mutex);
        if (shared_->state() == SFT_IN_PROGRESS && !shared_->joined)
            fail(SFT_INVALID, "the communicator is still being set up: wait for it first");
        shared_->queue.push_back({std::move(task), std::move(promise)});
        ++shared_->pending;
        shared_->changed.notify_all();
    }

    template <class Where>
    void start(Where where) {
        owner_ = getpid();
        thread_ = std::thread([shared = shared_, where] {
            try {
                run(*shared, where);
            } catch (const Error& error) {
                shared->broken(error);
            } catch (const std::exception& error) {
                shared->broken({SFT_INTERNAL, error.what()});
            }
            std::lock_guard<std::mutex> lock(shared->mutex);
            shared->ended = true;
            shared->changed.notify_all();
        });
    }

    template <class Where>
    static void run(Shared& shared, Where where) {
        Place place = where(shared);
        auto made = std::make_unique<SharedGroup>(place.token, place.rank, place.ranks);
        SharedGroup& group = *made;
        {
            std::lock_guard<std::mutex> lock(shared.mutex);
            shared.place = place;
            shared.group = std::move(made);
            if (shared.stop) return;
        }
        group.join();
        serve(shared, group);
    }

    static void serve(Shared& shared, SharedGroup& group) {
        std::unique_lock<std::mutex> lock(shared.mutex);
        shared.joined = true;
        for (;;) {
            if (shared.pending > 0) --shared.pending;
            shared.changed.notify_all();
            shared.changed.wait(lock, [&] { return shared.stop || !shared.queue.empty(); });
            if (shared.stop) return;
            Item item = std::move(shared.queue.front());
            shared.queue.pop_front();
            lock.unlock();
            item.run(group);
            lock.lock();
            if (shared.stop) return;
        }
    }

    void stop(const Error& why) {
        std::lock_guard<std::mutex> lock(shared_->mutex);
        if (why.status != SFT_OK) shared_->error = {SFT_OK, ""};
        shared_->stop = true;
        if (why.status != SFT_OK) shared_->poison(why);
        if (shared_->group && why.status != SFT_OK) shared_->group->abort();
        shared_->changed.notify_all();
    }

    void finish(int milliseconds) {
        if (getpid() != owner_) {  // a forked child: the thread, and maybe a lock holder, exist only in the parent
            if (thread_.joinable()) thread_.detach();
            new std::shared_ptr<Shared>(shared_);
            return;
        }
        if (!thread_.joinable()) return;
        bool settled;
        {
            std::unique_lock<std::mutex> lock(shared_->mutex);
            settled = shared_->changed.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] {
                return shared_->error.status != SFT_OK || shared_->pending == 0;
            });
        }
        stop(settled ? Error{SFT_OK, ""} : Error{SFT_ABORTED, "the communicator was closed"});
        thread_.join();
        std::lock_guard<std::mutex> lock(shared_->mutex);
        if (shared_->error.status == SFT_OK) shared_->error = {SFT_ABORTED, "the communicator was closed"};
        shared_->group.reset();
    }

    const Place place_;
    std::shared_ptr<Shared> shared_;
    std::thread thread_;
    pid_t owner_ = 0;
};

class HostBackend : public Backend {
  public:
    const char* platform() const override { return "host"; }
    void open() override {}
    uint32_t features() override {
        return SFT_FEATURE_MEMORY | SFT_FEATURE_COLLECTIVES | SFT_FEATURE_SPLIT | SFT_FEATURE_SHRINK;
    }
    void versions(int& driver, int& collectives) override {
        driver = 0;
        collectives = 0;
    }
    std::string describe() override { return "driver: memfd\ncollectives: shared memory, one host\n"; }
    int device_count() override { return 1; }
    sft_device_info device(int) override {
        sft_device_info info{};
        std::snprintf(info.name, sizeof info.name, "host memory");
        uint64_t unused;
        device_free(0, unused, info.bytes);
        info.granularity = page();
        info.features = SFT_FEATURE_MEMORY;
        return info;
    }
    void device_free(int, uint64_t& free_bytes, uint64_t& bytes) override {
        struct sysinfo facts{};
        if (sysinfo(&facts) != 0) fail_system(errno, "sysinfo");
        free_bytes = static_cast<uint64_t>(facts.freeram) * facts.mem_unit;
        bytes = static_cast<uint64_t>(facts.totalram) * facts.mem_unit;
    }

    std::shared_ptr<Memory> create(int, uint64_t bytes, uint32_t flags) override {
        Fd fd(static_cast<int>(syscall(SYS_memfd_create, "slurm-ft", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
        if (fd.get() < 0) fail_system(errno, "memfd_create");
        uint64_t mapped = round_up(bytes);
        if (ftruncate(fd.get(), static_cast<off_t>(mapped)) != 0) fail_system(errno, "ftruncate");
        // The kernel would fill the machine before it noticed.
        if ((flags & SFT_POPULATE) != 0 && mapped > device(0).bytes)
            fail(SFT_NO_MEMORY, "%llu bytes are more than this machine has", static_cast<unsigned long long>(mapped));
        if ((flags & SFT_POPULATE) != 0 && fallocate(fd.get(), 0, 0, static_cast<off_t>(mapped)) != 0)
            fail_system(errno, "no room for the memory's pages");
        // Nobody who holds the descriptor can cut the memory under a mapping.
        if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail_system(errno, "seals");
        return std::make_shared<HostMemory>(std::move(fd), bytes, mapped, false);
    }

    std::shared_ptr<Memory> import(int, int fd, uint64_t bytes) override {
        Fd own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
        if (own.get() < 0) fail(SFT_INVALID, "descriptor %d: %s", fd, std::strerror(errno));
        int seals = fcntl(own.get(), F_GET_SEALS);
        if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) fail(SFT_INVALID, "descriptor %d is no memory of slurm-ft", fd);
        struct stat facts{};
        if (fstat(own.get(), &facts) != 0) fail_system(errno, "fstat");
        uint64_t mapped = round_up(bytes);
        if (static_cast<uint64_t>(facts.st_size) < mapped)
            fail(SFT_INVALID, "descriptor %d has %lld bytes, %llu were asked for", fd,
                 static_cast<long long>(facts.st_size), static_cast<unsigned long long>(bytes));
        return std::make_shared<HostMemory>(std::move(own), bytes, mapped, true);
    }

    Fd dmabuf(int, uint64_t, uint64_t, uint64_t&, uint64_t&) override {
        fail(SFT_UNSUPPORTED, "host memory has no dma-buf; RDMA libraries register it by its address");
    }

    void unique_id(uint8_t* id) override {
        Token token = random_token();
        std::memset(id, 0, SFT_ID_BYTES);
        std::memcpy(id, ID_MARK, sizeof ID_MARK);
        std::memcpy(id + sizeof ID_MARK, token.data(), token.size());
    }

    std::shared_ptr<Communicator> join(int, const uint8_t* id, int rank, int ranks) override {
        if (std::memcmp(id, ID_MARK, sizeof ID_MARK) != 0) fail(SFT_INVALID, "the id is not one of the host backend");
        Place place{{}, rank, ranks};
        std::memcpy(place.token.data(), id + sizeof ID_MARK, place.token.size());
        return std::make_shared<HostCommunicator>(place);
    }

  private:
    static uint64_t page() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }
    static uint64_t round_up(uint64_t bytes) { return (bytes + page() - 1) / page() * page(); }
};

}  // namespace

Backend& backend() {
    static auto& instance = *new HostBackend;
    return instance;
}

}  // namespace sft
