// PyTorch's allocator of CUDA memory, all of it, over pools of bfc: a c10::cuda::CUDACachingAllocator::CUDAAllocator.
//
// Compiled against the user's PyTorch, since the class's table of functions differs between versions. Memory is asked
// for through the table of bfc_allocator.h: a hit and an ordinary free take no GIL, a miss takes it. Statistics,
// snapshots and settings are asked of a Python object, the `Books` of _torch_cuda.py, with the GIL held. No lock of ours
// is held while Python is called.
//
// What is allocated, and what happened, stands in the books of bfc alone. Here are only the contexts that PyTorch
// gathers while a history is recorded, by the number that bfc gives an allocation.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <bfc_torch_allocator.hpp>
#include <c10/core/Allocator.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ApproximateClock.h>
#include <torch/headeronly/version.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "columns.hpp"
#include "history.hpp"
#include "torch_shared.hpp"

namespace torch::cuda::CUDAPluggableAllocator {  // libtorch_cuda exports it
void changeCurrentAllocator(const std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator>&);
}

namespace {
using namespace c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;
using c10::GatheredContext;
using Action = TraceEntry::Action;
using Context = std::shared_ptr<GatheredContext>;

constexpr int kDevices = 64;
constexpr size_t kWhy = 4096;
constexpr MempoolId_t kDefault{0, 0};
// Of bfc's own private pools, whose ids count like PyTorch's, PyTorch's differ in one bit.
constexpr unsigned long long kOurs = 1ull << 32;

const bfc_allocator* table;
PyObject* books;

int64_t handle(cudaStream_t stream) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(stream)); }
void* address(uint64_t number) { return reinterpret_cast<void*>(static_cast<uintptr_t>(number)); }

int64_t now_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
}

// -- Python ------------------------------------------------------------------------------------------

struct WithGil {
    PyGILState_STATE state = PyGILState_Ensure();
    ~WithGil() { PyGILState_Release(state); }
};

// What Python raised, as text.
std::string raised() {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    PyObject* text = error ? PyObject_Str(error) : nullptr;
    const char* said = text ? PyUnicode_AsUTF8(text) : nullptr;
    const std::string why = said ? said : "unknown error";
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return why;
}

// Calls a method of the books; `read` takes what it returns. Preserves an exception that is being raised, since
// destructors call this, too.
template <class Read, class... Arguments>
void ask(const char* method, Read read, const char* format, Arguments... arguments) {
    std::string why;
    {
        WithGil gil;
        PyObject *kind, *error, *trace;
        PyErr_Fetch(&kind, &error, &trace);
        PyObject* result = PyObject_CallMethod(books, method, format, arguments...);
        if (result) read(result);
        if (!result || PyErr_Occurred()) why = raised();
        Py_XDECREF(result);
        PyErr_Restore(kind, error, trace);
    }
    TORCH_CHECK(why.empty(), "bfc: ", why);
}
template <class... Arguments>
void tell(const char* method, const char* format, Arguments... arguments) {
    ask(method, [](PyObject*) {}, format, arguments...);
}
template <class... Arguments>
uint64_t number(const char* method, const char* format, Arguments... arguments) {
    uint64_t found = 0;
    ask(method, [&](PyObject* it) { found = PyLong_AsUnsignedLongLongMask(it); }, format, arguments...);
    return found;
}

template <class Row>
std::vector<Row> rows_of(PyObject* bytes) {
    std::vector<Row> rows(PyBytes_GET_SIZE(bytes) / sizeof(Row));
    if (!rows.empty()) std::memcpy(rows.data(), PyBytes_AS_STRING(bytes), rows.size() * sizeof(Row));
    return rows;
}

struct Rows {
    std::vector<bfc::RegionRow> regions;
    std::vector<bfc::ChunkRow> chunks;
    std::vector<bfc::HistoryRecord> history;
    uint64_t changes = 0;  // how often memory had come or gone before
};

Rows read_rows(DeviceIndex device, bool with_history) {
    Rows rows;
    ask("rows", [&](PyObject* it) {
        rows.regions = rows_of<bfc::RegionRow>(PyTuple_GET_ITEM(it, 0));
        rows.chunks = rows_of<bfc::ChunkRow>(PyTuple_GET_ITEM(it, 1));
        rows.history = rows_of<bfc::HistoryRecord>(PyTuple_GET_ITEM(it, 2));
        rows.changes = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(it, 3));
    }, "ii", int(device), int(with_history));
    return rows;
}

MempoolId_t pool_id(const uint64_t (&pool)[2]) { return {pool[0] & ~kOurs, pool[1]}; }

// Calls with each region that is not asleep, and its chunks.
template <class Each>
void each_region(const Rows& rows, Each each) {
    size_t begin = 0;
    for (const auto& region : rows.regions) {
        if (!(region.flags & bfc::kAsleep)) each(region, rows.chunks.data() + begin, rows.chunks.data() + region.chunks_end);
        begin = region.chunks_end;
    }
}

// -- what is known of an allocation while a history is recorded ---------------------------------------

thread_local std::vector<std::string> compiling;
thread_local std::string metadata;

// What a thread has told PyTorch of itself, which each entry of a history has.
struct Words {
    std::string compiling = "N/A", metadata;
};

Words words_now() { return {compiling.empty() ? "N/A" : compiling.back(), metadata}; }

struct Note {
    Context taken, freed;
    Words at_taking, at_freeing;
};

struct Refusal {
    Context context;
    Words words;
};

// The cache was emptied, or a snapshot taken: what came and went from here to there is of that.
struct Doing {
    int64_t from_us, to_us;
    Context context;
    Words words;
};

class Notes {
public:
    void add(int64_t id, Context context) {
        const std::lock_guard<std::mutex> held(lock_);
        notes_[id] = {std::move(context), nullptr, words_now(), {}};
    }
    void add_free(int64_t id, Context context) {
        const std::lock_guard<std::mutex> held(lock_);
        auto found = notes_.find(id);
        if (found == notes_.end()) return;
        found->second.freed = std::move(context);
        found->second.at_freeing = words_now();
        freed_.push_back(id);
        for (; freed_.size() > most_; freed_.pop_front()) notes_.erase(freed_.front());
    }
    void add_refusal(Context context) {
        const std::lock_guard<std::mutex> held(lock_);
        refused_.push_back({std::move(context), words_now()});
    }
    void add_doing(int64_t from_us, Context context) {
        const std::lock_guard<std::mutex> held(lock_);
        doings_.push_back({from_us, now_us(), std::move(context), words_now()});
        if (doings_.size() > most_) doings_.erase(doings_.begin());
    }
    void annotate(TraceEntry entry) {
        const std::lock_guard<std::mutex> held(lock_);
        annotated_.push_back(std::move(entry));
    }
    void restart(size_t most) {
        const std::lock_guard<std::mutex> held(lock_);
        notes_.clear();
        freed_.clear();
        refused_.clear();
        doings_.clear();
        annotated_.clear();
        most_ = most;
    }
    Note find(int64_t id) {
        const std::lock_guard<std::mutex> held(lock_);
        auto found = notes_.find(id);
        return found == notes_.end() ? Note{} : found->second;
    }
    std::vector<Refusal> refusals() {
        const std::lock_guard<std::mutex> held(lock_);
        return refused_;
    }
    std::vector<Doing> doings() {
        const std::lock_guard<std::mutex> held(lock_);
        return doings_;
    }
    std::vector<TraceEntry> annotations() {
        const std::lock_guard<std::mutex> held(lock_);
        return annotated_;
    }

private:
    std::mutex lock_;
    std::unordered_map<int64_t, Note> notes_;
    std::deque<int64_t> freed_;  // the numbers of allocations that were freed, oldest first
    std::vector<Refusal> refused_;
    std::vector<Doing> doings_;
    std::vector<TraceEntry> annotated_;
    size_t most_ = SIZE_MAX;
};

// -- the allocator -----------------------------------------------------------------------------------

// PyTorch's state of a private pool: what is live in it.
struct Checkpoint final : AllocatorState {
    struct Block {
        uint64_t ptr, size;
        cudaStream_t stream;
    };
    MempoolId_t pool;
    std::vector<Block> live;
};

std::string in_words(size_t nbytes) {
    char text[32];
    const double size = static_cast<double>(nbytes);
    if (nbytes <= 1024) std::snprintf(text, sizeof text, "%zu bytes", nbytes);
    else if (nbytes <= 1048576) std::snprintf(text, sizeof text, "%.2f KiB", size / 1024);
    else if (nbytes <= 1073741824) std::snprintf(text, sizeof text, "%.2f MiB", size / 1048576);
    else std::snprintf(text, sizeof text, "%.2f GiB", size / 1073741824);
    return text;
}

void free_memory(void* ptr) noexcept;

class Whole final : public CUDAAllocator {
public:
    // -- memory --------------------------------------------------------------------------------------
    void* take(size_t nbytes, DeviceIndex device, cudaStream_t stream) {
        if (nbytes == 0) return nullptr;
        open(device);
        const Context context = gather(RecordContext::STATE);  // may take the GIL: no lock is held
        MempoolId_t pool;
        void* ptr = nullptr;
        char why[kWhy] = "";
        const bfc_result result =
            find_scope(device, stream, pool)
                ? table->allocate_in_pool(table->self, device, nbytes, handle(stream), pool.first | kOurs, pool.second, &ptr,
                                          why, sizeof why)
                : table->allocate(table->self, device, nbytes, handle(stream), &ptr, why, sizeof why);
        if (result == BFC_OUT_OF_MEMORY) refuse(device, nbytes, context, why);
        TORCH_CHECK(result == BFC_OK, std::strncmp(why, "bfc: ", 5) ? "bfc: " : "", why);
        if (watched()) note_taken(ptr, device, context);
        if (const auto* traced = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(traced != nullptr))
            (*traced)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(ptr));
        return ptr;
    }

    void give(void* ptr) {
        if (!ptr) return;
        if (const auto* traced = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(traced != nullptr))
            (*traced)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(ptr));
        // A child may use no CUDA. A thread that it has not may have had a lock of ours, or of PyTorch's, at the fork.
        if ((watched() || exports_.are_some()) && getpid() == process_) {
            if (watched()) note_freed(ptr);
            exports_.drop(ptr);
        }
        table->free(table->self, ptr);
    }

    c10::DataPtr allocate(size_t nbytes) override {
        const DeviceIndex device = current();
        void* ptr = take(nbytes, device, c10::cuda::getCurrentCUDAStream(device));
        return {ptr, ptr, &free_memory, c10::Device(c10::DeviceType::CUDA, device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
    void* raw_alloc(size_t nbytes) override {
        const DeviceIndex device = current();
        return take(nbytes, device, c10::cuda::getCurrentCUDAStream(device));
    }
    void* raw_alloc_with_stream(size_t nbytes, cudaStream_t stream) override { return take(nbytes, current(), stream); }
    void raw_delete(void* ptr) override { give(ptr); }
    void copy_data(void* to, const void* from, size_t nbytes) const override {
        C10_CUDA_CHECK(cudaMemcpy(to, from, nbytes, cudaMemcpyDeviceToDevice));
    }
    // Mapped memory of another device can be reached by the call for peers only, unless access was enabled.
    cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t nbytes, cudaStream_t stream,
                            bool p2p_enabled) override {
        if (p2p_enabled || to_device == from_device)
            return cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, stream);
        return cudaMemcpyPeerAsync(to, to_device, from, from_device, nbytes, stream);
    }
    void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
        if (!data.get() || data.get_deleter() != &free_memory) return;  // memory of another library
        char why[kWhy] = "";
        TORCH_CHECK(table->record_stream(table->self, data.get(), handle(stream.stream()), why, sizeof why) == BFC_OK,
                    "bfc: ", why);
    }

    // -- life and settings ---------------------------------------------------------------------------
    void init(int device_count) override {
        process_ = getpid();
        devices_ = device_count;
        initialized_ = true;
        tell("initialized", nullptr);
    }
    bool initialized() override { return initialized_; }
    double getMemoryFraction(DeviceIndex device) override {
        double fraction = 1;
        open(device);
        ask("memory_fraction", [&](PyObject* it) { fraction = PyFloat_AsDouble(it); }, "i", int(device));
        return fraction;
    }
    void setMemoryFraction(double fraction, DeviceIndex device) override {
        TORCH_CHECK(0 <= fraction && fraction <= 1, "invalid fraction:", fraction, ". Please set within [0, 1].");
        open(device);
        tell("set_memory_fraction", "id", int(device), fraction);
    }
    std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
        std::vector<StreamSegmentSize> sizes;
        if (!is_open(device)) return sizes;
        const Rows rows = read_rows(device, false);
        each_region(rows, [&](const bfc::RegionRow& it, auto*, auto*) {
            if (it.flags & bfc::kInRange)
                sizes.emplace_back(static_cast<cudaStream_t>(address(it.stream)), it.kind == 0, it.size);
        });
        return sizes;
    }
    void enable(bool value) override { enabled_ = value; }
    bool isEnabled() const override { return enabled_; }
    void emptyCache(MempoolId_t pool = {0, 0}) override {
        const Context context = gather(RecordContext::ALL);
        const int64_t began = now_us();
        tell("empty_cache", "KK", ours(pool), pool.second);
        if (!watched_) return;
        for (int device = 0; device < kDevices; ++device) {
            if (!is_open(device)) continue;
            if (recording_) notes_[device].add_doing(began, context);
            if (tracked_) track_segments(static_cast<DeviceIndex>(device), context);
        }
    }
    void cacheInfo(DeviceIndex device, size_t* largest) override {
        if (*largest == 0) {  // as PyTorch's: what the device has free
            size_t total = 0;
            C10_CUDA_CHECK(cudaMemGetInfo(largest, &total));
        }
        if (is_open(device)) *largest = std::max<size_t>(*largest, number("largest_free", "i", int(device)));
    }
    void* getBaseAllocation(void* ptr, size_t* size) override {
        const Place place = find_place(ptr);
        TORCH_CHECK(!place.is_mapped, "bfc: a tensor in mapped memory (stitched pages, expandable segments) has no one base "
                                      "that cudaIpcGetMemHandle takes; torch.multiprocessing shares it all the same");
        if (size) *size = place.size;
        return address(place.start);
    }
    void enablePeerAccess(DeviceIndex device, DeviceIndex to) override {
        const c10::cuda::CUDAGuard guard(device);
        const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled) (void)cudaGetLastError();
        else C10_CUDA_CHECK(error);
        open(to);
        tell("enable_peer", "ii", int(to), int(device));
    }
    std::string name() override { return "bfc"; }

    // -- figures -------------------------------------------------------------------------------------
    DeviceStats getDeviceStats(DeviceIndex device) override {
        if (!is_open(device)) return {};
        bfc_device_stats from;
        char why[kWhy] = "";
        TORCH_CHECK(table->stats(table->self, device, &from, why, sizeof why) == BFC_OK, "bfc: ", why);
        DeviceStats to = bfc::stats_of(from);
        fill_newer(to, device);
        return to;
    }
    void resetAccumulatedStats(DeviceIndex device) override {
        char why[kWhy] = "";
        if (!is_open(device)) return;
        TORCH_CHECK(table->reset_accumulated_stats(table->self, device, why, sizeof why) == BFC_OK, "bfc: ", why);
    }
    void resetPeakStats(DeviceIndex device) override {
        char why[kWhy] = "";
        if (is_open(device))
            TORCH_CHECK(table->reset_peak_stats(table->self, device, why, sizeof why) == BFC_OK, "bfc: ", why);
    }

    // -- snapshots and history -----------------------------------------------------------------------
    SnapshotInfo snapshot(MempoolId_t only = {0, 0}, bool with_traces = true) override {
        SnapshotInfo info;
        info.device_traces.resize(std::max(devices_, 1));
        for (int device = 0; device < kDevices; ++device) {
            if (!is_open(device)) continue;
            const int64_t began = now_us();
            const Rows rows = read_rows(static_cast<DeviceIndex>(device), with_traces || recording_);
            if (recording_) notes_[device].add_doing(began, nullptr);
            auto entries = traces(rows.history, static_cast<DeviceIndex>(device));
            add_segments(info.segments, rows, entries, static_cast<DeviceIndex>(device), only);
            track_look(info.segments, static_cast<DeviceIndex>(device));
            if (with_traces && device < static_cast<int>(info.device_traces.size()))
                info.device_traces[device] = std::move(entries);
        }
        const auto clock = c10::ApproximateClockToUnixTimeConverter().makeConverter();
        {
            const std::lock_guard<std::mutex> held(lock_);
            info.external_annotations = annotations_;
        }
        for (auto& it : info.external_annotations) it.time_.t_ = clock(it.time_.approx_t_) / 1000;
        set_settings(info.config_metadata);
        return info;
    }
    void recordHistory(bool enabled, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
                       const std::vector<std::string>& skipped) override {
        TORCH_CHECK(when == RecordContext::NEVER || recorder, "contexts are to be kept, and nothing gathers them");
        std::string words;
        for (const auto& it : skipped) words += it + " ";
        const bool restarts = !enabled || clear || !recording_;
        if (restarts) {
            tell("record_history", "iKs", int(enabled), static_cast<unsigned long long>(most), words.c_str());
            for (auto& it : notes_) it.restart(std::max<size_t>(1, most));
            const std::lock_guard<std::mutex> held(lock_);
            annotations_.clear();
        }
        recorder_ = enabled ? recorder : nullptr;
        when_ = enabled ? when : RecordContext::NEVER;
        recording_ = enabled;
        set_watched();
    }
    bool isHistoryEnabled() override { return recording_; }
    void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) override {
        c10::CachingDeviceAllocator::AnnotationEntry entry(current(), c10::getApproximateTime());
        for (const auto& it : pairs) entry.recordUserMetadata(it.first, it.second);
        const std::lock_guard<std::mutex> held(lock_);
        annotations_.push_back(std::move(entry));
    }
    void pushCompileContext(std::string& text) override { compiling.push_back(text); }
    void popCompileContext() override {
        if (!compiling.empty()) compiling.pop_back();
    }
    void setUserMetadata(const std::string& text) override { metadata = text; }
    std::string getUserMetadata() override { return metadata; }
    void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
        const std::lock_guard<std::mutex> held(lock_);
        observers_.push_back(std::move(observer));
    }
    void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
        tracked_ = true;
        for (int device = 0; device < kDevices; ++device)  // what is there by now is not told
            if (is_open(device)) track_segments(static_cast<DeviceIndex>(device), nullptr);
        {
            const std::lock_guard<std::mutex> held(lock_);
            trackers_.push_back(std::move(tracker));
        }
        set_watched();
    }

    // -- private pools -------------------------------------------------------------------------------
    void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
        open(device);
        tell("begin_pool", "iKKi", int(device), ours(pool), pool.second, int(kCapturesAreNotMarked));
        const std::lock_guard<std::mutex> held(lock_);
        scopes_.push_back({device, pool, std::move(filter)});
        open_scopes_ = scopes_.size();
    }
    void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
        {
            const std::lock_guard<std::mutex> held(lock_);
            for (auto it = scopes_.begin(); it != scopes_.end(); ++it)
                if (it->device == device && it->pool == pool) {
                    scopes_.erase(it);
                    break;
                }
            open_scopes_ = scopes_.size();
        }
        tell("end_pool", "iKKi", int(device), ours(pool), pool.second, int(kCapturesAreNotMarked));
    }
    void releasePool(DeviceIndex device, MempoolId_t pool) override {
        tell("release_pool", "iKK", int(device), ours(pool), pool.second);
    }
    void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, std::shared_ptr<CUDAAllocator> inner) override {
        TORCH_CHECK(!inner || inner.get() == this,
                    "bfc: a MemPool over another allocator (NCCL's, symmetric memory) is not served under bfc");
        open(device);
        tell("create_pool", "iKK", int(device), ours(pool), pool.second);
    }
    int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
        if (!is_open(device)) return 0;
        return static_cast<int>(number("pool_use_count", "iKK", int(device), ours(pool), pool.second));
    }
    void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override {
        open(device);
        tell("set_use_on_oom", "iKKi", int(device), ours(pool), pool.second, int(use));
    }
    void setNoSplit(DeviceIndex device, MempoolId_t pool) override {
        open(device);
        tell("set_no_split", "iKK", int(device), ours(pool), pool.second);
    }

    // -- graph trees ---------------------------------------------------------------------------------
    bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool, const std::unordered_set<void*>& expected) override {
        const auto live = live_in(device, pool);
        if (live.size() != expected.size()) return false;
        return std::all_of(live.begin(), live.end(), [&](const auto& it) { return expected.count(address(it.ptr)); });
    }
    std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
        auto state = std::make_shared<Checkpoint>();
        state->pool = pool;
        state->live = live_in(device, pool);
        return state;
    }
    // As PyTorch's: all that is live is freed, and what was live then is allocated again, at its address. What stays
    // where it is needs no call.
    CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<AllocatorState> given) override {
        auto* state = dynamic_cast<Checkpoint*>(given.get());
        TORCH_CHECK(state, "bfc: this is no checkpoint of this allocator");
        CheckpointDelta delta;
        std::set<uint64_t> wanted, live;
        for (const auto& it : state->live) wanted.insert(it.ptr);
        for (const auto& it : live_in(device, state->pool)) {
            live.insert(it.ptr);
            delta.ptrs_freed.push_back(address(it.ptr));
            if (!wanted.count(it.ptr)) give(address(it.ptr));
        }
        for (const auto& it : state->live) {
            if (!live.count(it.ptr)) put_at(device, state->pool, it.ptr, it.size, it.stream);
            delta.dataptrs_allocd.emplace_back(address(it.ptr), address(it.ptr), &free_memory,
                                               c10::Device(c10::DeviceType::CUDA, device));
        }
        return delta;
    }

#if TORCH_VERSION_MINOR >= 13
    // Out of the free block of the current stream that this request might get, if that lies there.
    c10::DataPtr allocateWithAddress(size_t nbytes, void* at) override {
        const DeviceIndex device = current();
        const c10::Device on(c10::DeviceType::CUDA, device);
        if (nbytes == 0) return {nullptr, nullptr, &free_memory, on};
        const auto ptr = reinterpret_cast<uintptr_t>(at);
        TORCH_CHECK(ptr % 512 == 0, "mallocWithAddress: addr must be aligned to kMinBlockSize (512 bytes), got ", at);
        open(device);
        const Context context = gather(RecordContext::STATE);
        const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device);
        MempoolId_t pool = kDefault;
        find_scope(device, stream, pool);
        bool is_there = false;
        each_region(read_rows(device, false), [&](const bfc::RegionRow& it, auto*, auto*) {
            is_there |= it.ptr <= ptr && ptr < it.ptr + it.size && it.stream == uint64_t(handle(stream)) &&
                        pool_id(it.pool) == pool && it.kind == (nbytes > 1048576);
        });
        try {
            if (is_there) put_at(device, pool, ptr, nbytes, stream);
        } catch (const c10::Error&) {  // it is in use there, or too little is free
            is_there = false;
        }
        TORCH_CHECK(is_there, "Could not allocate CUDA storage at exact address ", at);
        if (watched()) note_taken(at, device, context);
        if (const auto* traced = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(traced != nullptr))
            (*traced)->trace_gpu_memory_allocation(c10::kCUDA, ptr);
        return {at, at, &free_memory, on};
    }
#endif

    // -- other processes -----------------------------------------------------------------------------
    ShareableHandle shareIpcHandle(void* ptr) override {
        const Place place = find_place(ptr);
        if (place.is_mapped) {
            auto [text, begin] = exports_.add(place.block, place.block_size);
            return {begin + static_cast<ptrdiff_t>(reinterpret_cast<uintptr_t>(ptr) - place.block), text};
        }
        cudaIpcMemHandle_t made;
        C10_CUDA_CHECK(cudaIpcGetMemHandle(&made, address(place.start)));
        return {static_cast<ptrdiff_t>(reinterpret_cast<uintptr_t>(ptr) - place.start),
                std::string(reinterpret_cast<char*>(&made), sizeof made)};
    }
    std::shared_ptr<void> getIpcDevPtr(std::string text) override {
        if (bfc::shared::is_handle(text)) return bfc::shared::open(text, current());
        cudaIpcMemHandle_t given;
        TORCH_CHECK(text.size() == sizeof given,
                    "bfc: this is no handle of an allocator of bfc: both processes must run under it");
        std::memcpy(&given, text.data(), sizeof given);
        void* ptr = nullptr;
        C10_CUDA_CHECK(cudaIpcOpenMemHandle(&ptr, given, cudaIpcMemLazyEnablePeerAccess));
        return {ptr, [](void* it) { (void)cudaIpcCloseMemHandle(it); }};
    }

    // -- since 2.13 ----------------------------------------------------------------------------------
#if TORCH_VERSION_MINOR >= 13
    static constexpr bool kCapturesAreNotMarked = false;
    void markCaptureBegin(DeviceIndex device) override {
        open(device);
        tell("mark_capture", "ii", int(device), 1);
    }
    void markCaptureEnd(DeviceIndex device) override { tell("mark_capture", "ii", int(device), 0); }
    Context getContextForPointer(const void* ptr) override {
        const bfc_block block = look(ptr);
        return block.device < 0 ? nullptr : notes_[block.device].find(block.allocation_id).taken;
    }
    void attachOomRejectionObserver(OomRejectionObserver observer) override {
        const std::lock_guard<std::mutex> held(lock_);
        rejection_observers_.push_back(std::move(observer));
    }
#else
    static constexpr bool kCapturesAreNotMarked = true;
    void attachOomRejectionObserver(OutOfMemoryObserver) {}
#endif

    // -- since 2.14 ----------------------------------------------------------------------------------
#if TORCH_VERSION_MINOR >= 14
    bool supportsUserMetadata() override { return true; }
    void annotateMemory(const void* ptr, const std::string& text) override {
        const bfc_block block = look(ptr);
        TORCH_CHECK(block.device >= 0, "bfc: no allocation begins at this address: ", ptr);
        TraceEntry entry(Action::ANNOTATE, static_cast<DeviceIndex>(block.device), reinterpret_cast<uintptr_t>(ptr),
                         block.requested_size, address(static_cast<uint64_t>(block.stream)), kDefault, 0,
                         gather(RecordContext::ALLOC), "N/A", text);
        entry.time_.t_ = now_us();
        if (recording_) notes_[block.device].annotate(std::move(entry));
    }
#endif

private:
    struct Segment {
        uint64_t size, stream, number;
        MempoolId_t pool;
        bool in_range;
    };
    struct Told {  // what trackers know of the segments of a device
        std::atomic<uint64_t> changes{0};
        std::map<uint64_t, Segment> segments;
    };
    struct Place {  // where an address lies: in a region, and in a block of it
        uint64_t start = 0, size = 0, block = 0, block_size = 0;
        bool is_mapped = false;
    };
    struct Scope {
        DeviceIndex device;
        MempoolId_t pool;
        std::function<bool(cudaStream_t)> takes;
    };

    static void put_at(DeviceIndex device, const MempoolId_t& pool, uint64_t at, size_t nbytes, cudaStream_t stream) {
        tell("allocate_at", "iKKKKL", int(device), ours(pool), pool.second, static_cast<unsigned long long>(at),
             static_cast<unsigned long long>(nbytes), handle(stream));
    }
    static unsigned long long ours(const MempoolId_t& pool) { return pool == kDefault ? 0 : pool.first | kOurs; }
    static DeviceIndex current() {
        DeviceIndex device = 0;
        C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
        return device;
    }
    // A pool, and the context that it needs, is made for devices that are used.
    void open(int device) {
        TORCH_CHECK(0 <= device && device < kDevices, "bfc: there is no device ", device);
        if (is_open(device)) return;
        tell("open", "i", device);
        opened_[device].store(true, std::memory_order_release);
    }
    bool is_open(int device) const {
        return 0 <= device && device < kDevices && opened_[device].load(std::memory_order_acquire);
    }
    Place find_place(const void* ptr) {
        const uint64_t at = reinterpret_cast<uintptr_t>(ptr);
        const int device = table->device_of(table->self, ptr);
        TORCH_CHECK(device >= 0, "invalid device pointer: ", ptr);
        Place place;
        const Rows rows = read_rows(static_cast<DeviceIndex>(device), false);
        each_region(rows, [&](const bfc::RegionRow& it, const bfc::ChunkRow* begin, const bfc::ChunkRow* end) {
            if (at < it.ptr || at >= it.ptr + it.size) return;
            for (const auto* chunk = begin; chunk != end; ++chunk)
                if (chunk->ptr <= at && at < chunk->ptr + chunk->size)
                    place = {it.ptr, it.size, chunk->ptr, chunk->size, (it.flags & (bfc::kInRange | bfc::kIsView)) != 0};
        });
        TORCH_CHECK(place.start, "invalid device pointer: ", ptr);
        return place;
    }
    bool find_scope(DeviceIndex device, cudaStream_t stream, MempoolId_t& pool) {
        if (!open_scopes_.load(std::memory_order_acquire)) return false;
        const std::lock_guard<std::mutex> held(lock_);
        for (const Scope& it : scopes_)
            if (it.device == device && it.takes(stream)) {
                pool = it.pool;
                return true;
            }
        return false;
    }

    // PyTorch's words first, which programs look for, then ours.
    [[noreturn]] void refuse(DeviceIndex device, size_t nbytes, const Context& context, const char* why) {
        uint64_t asked = 0, limit = 0, device_free = 0, rejected = 0;
        ask("last_refusal", [&](PyObject* it) {
            asked = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(it, 0));
            limit = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(it, 1));
            device_free = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(it, 2));
            rejected = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(it, 3));
        }, nullptr);
        if (recording_ && !rejected) notes_[device].add_refusal(context);
        std::vector<OutOfMemoryObserver> observers;
        decltype(rejection_observers_) rejection_observers;
        {
            const std::lock_guard<std::mutex> held(lock_);
            observers = observers_;
            rejection_observers = rejection_observers_;
        }
        if (rejected)
            for (const auto& observer : rejection_observers) observer(device, asked, limit, device_free);
        else
            for (const auto& observer : observers) observer(device, asked, limit, device_free);
        size_t now_free = 0, total = 0;
        (void)cudaMemGetInfo(&now_free, &total);
        TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", in_words(asked ? asked : nbytes), ". GPU ",
                         static_cast<int>(device), " has a total capacity of ", in_words(total), " of which ",
                         in_words(now_free), " is free. bfc: ", why);
    }

    // -- while a history is recorded, or a profiler or tracker looks on -------------------------------
    bool watched() const { return watched_.load(std::memory_order_relaxed) || c10::memoryProfilingEnabled(); }
    void set_watched() { watched_ = recording_ || tracked_; }
    Context gather(RecordContext level) const {
        const CreateContextFn recorder = recorder_.load();
        return recorder && when_.load() >= level ? recorder() : nullptr;
    }
    static bfc_block look(const void* ptr) {
        bfc_block block;
        table->look(table->self, ptr, &block);
        return block;
    }
    void note_taken(void* ptr, DeviceIndex device, const Context& context) {
        const bfc_block block = look(ptr);
        if (block.device < 0) return;
        if (recording_) notes_[device].add(block.allocation_id, context);
        track(Action::ALLOC, block, ptr, when_.load() >= RecordContext::ALLOC ? context : nullptr);
        report(ptr, block, static_cast<int64_t>(block.size));
    }
    void note_freed(void* ptr) {
        const Context context = gather(RecordContext::ALL);
        bfc_block block = look(ptr);
        if (block.device < 0) return;
        if (recording_) notes_[block.device].add_free(block.allocation_id, context);
        track(Action::FREE_REQUESTED, block, ptr, context);
        track(Action::FREE_COMPLETED, block, ptr, context);
        block.bytes_in_use -= block.size;
        report(ptr, block, -static_cast<int64_t>(block.size));
    }
    static void report(void* ptr, const bfc_block& block, int64_t change) {
        if (c10::memoryProfilingEnabled())
            c10::reportMemoryUsageToProfiler(ptr, change, block.bytes_in_use, block.bytes_reserved,
                                             c10::Device(c10::DeviceType::CUDA, static_cast<DeviceIndex>(block.device)));
    }
    void track(Action action, const bfc_block& block, void* ptr, Context context) {
        if (!tracked_) return;
        if (action == Action::ALLOC && block.changes != told_[block.device].changes.load())
            track_segments(static_cast<DeviceIndex>(block.device), context);
        tell_trackers({action, static_cast<DeviceIndex>(block.device), reinterpret_cast<uintptr_t>(ptr), block.requested_size,
                       address(static_cast<uint64_t>(block.stream)), kDefault, c10::getApproximateTime(),
                       std::move(context)});
    }
    void track_look(const std::vector<SegmentInfo>& segments, DeviceIndex device) {
        if (!tracked_) return;
        size_t active = 0;
        for (const auto& it : segments) active += it.device == device ? it.active_size : 0;
        tell_trackers({Action::SNAPSHOT, device, 0, active, address(0), kDefault, c10::getApproximateTime(), nullptr});
    }
    void tell_trackers(const TraceEntry& entry) {
        std::vector<AllocatorTraceTracker> trackers;
        {
            const std::lock_guard<std::mutex> held(lock_);
            trackers = trackers_;
        }
        for (const auto& tracker : trackers) tracker(entry);
    }
    // Tells trackers, such as NCCL's, the segments that came and went since they were last looked at: PyTorch's own
    // allocator tells each at once, and here it is told before the allocation that it came for.
    void track_segments(DeviceIndex device, const Context& context) {
        std::map<uint64_t, Segment> found;
        const Rows rows = read_rows(device, false);
        each_region(rows, [&](const bfc::RegionRow& it, auto*, auto*) {
            found[it.ptr] = {it.size, it.stream, it.number, pool_id(it.pool), (it.flags & bfc::kInRange) != 0};
        });
        std::vector<TraceEntry> entries;
        {
            const std::lock_guard<std::mutex> held(lock_);
            Told& told = told_[device];
            if (rows.changes <= told.changes) return;
            told.changes = rows.changes;
            std::swap(told.segments, found);
            add_changes(entries, found, told.segments, Action::SEGMENT_FREE, Action::SEGMENT_UNMAP, device, context);
            add_changes(entries, told.segments, found, Action::SEGMENT_ALLOC, Action::SEGMENT_MAP, device, context);
        }
        for (const auto& entry : entries) tell_trackers(entry);
    }
    // Not one that has come where another one was.
    static bool is_same(const Segment& one, const Segment& other) {
        return one.number == other.number && one.stream == other.stream && one.pool == other.pool;
    }
    // What `these` have and `those` have not. A range that is mapped further keeps its address.
    static void add_changes(std::vector<TraceEntry>& entries, const std::map<uint64_t, Segment>& these,
                            const std::map<uint64_t, Segment>& those, Action whole, Action part, DeviceIndex device,
                            const Context& context) {
        for (const auto& [at, it] : these) {
            const auto other = those.find(at);
            uint64_t same = other == those.end() || !is_same(it, other->second) ? 0 : other->second.size;
            if (!it.in_range && same != it.size) same = 0;
            if (same >= it.size) continue;
            entries.emplace_back(it.in_range ? part : whole, device, at + same, it.size - same, address(it.stream), it.pool,
                                 c10::getApproximateTime(), context);
        }
    }

    // -- rows of bfc as PyTorch's structures ----------------------------------------------------------
    void add_segments(std::vector<SegmentInfo>& segments, const Rows& rows, const std::vector<TraceEntry>& entries,
                      DeviceIndex device, const MempoolId_t& only) {
        std::unordered_map<uint64_t, Context> came;  // by the address: the request that a segment came for
        for (const auto& it : entries)
            if (it.action_ == Action::SEGMENT_ALLOC || it.action_ == Action::SEGMENT_MAP) came.emplace(it.addr_, it.context_);
            else if (it.action_ == Action::SEGMENT_FREE || it.action_ == Action::SEGMENT_UNMAP) came.erase(it.addr_);
        each_region(rows, [&](const bfc::RegionRow& region, const bfc::ChunkRow* begin, const bfc::ChunkRow* end) {
            if (only != kDefault && pool_id(region.pool) != only) return;
            SegmentInfo segment;
            segment.device = device;
            segment.address = region.ptr;
            segment.total_size = region.size;
            segment.stream = address(region.stream);
            segment.is_large = region.kind != 0;
            segment.is_expandable = region.flags & bfc::kInRange;
            segment.owner_private_pool_id = pool_id(region.pool);
#if TORCH_VERSION_MINOR >= 13
            segment.registration_counter = static_cast<int32_t>(region.number);  // NCCL registers in this order
#endif
            if (auto found = came.find(region.ptr); found != came.end()) segment.context_when_allocated = found->second;
            for (const auto* chunk = begin; chunk != end; ++chunk) {
                BlockInfo block;
                block.size = chunk->size;
                block.allocated = chunk->state == bfc::kRowInUse;
                block.active = block.allocated || chunk->state == bfc::kRowWaiting;
                block.requested_size = block.active ? chunk->requested_size : chunk->last_requested_size;
                if (block.active) {
                    segment.active_size += chunk->size;
                    segment.requested_size += chunk->requested_size;
                    segment.allocated_size += block.allocated ? chunk->size : 0;
                    block.context_when_allocated = notes_[device].find(chunk->allocation_id).taken;
                }
                segment.blocks.push_back(std::move(block));
            }
            segments.push_back(std::move(segment));
        });
        std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) {
            return std::pair(a.device, a.address) < std::pair(b.device, b.address);
        });
    }

    std::vector<TraceEntry> traces(const std::vector<bfc::HistoryRecord>& history, DeviceIndex device) {
        std::vector<TraceEntry> entries;
        const bool keeps = when_.load() >= RecordContext::ALLOC;
        const auto refusals = notes_[device].refusals();
        size_t refused = 0;
        for (const auto& it : history) refused += it.action == bfc::kOom;
        size_t refusal = refusals.size() < refused ? 0 : refusals.size() - refused;
        for (const auto& it : history) {
            static constexpr Action kActions[] = {Action::ALLOC, Action::FREE_REQUESTED, Action::FREE_COMPLETED,
                                                  Action::SEGMENT_ALLOC, Action::SEGMENT_FREE, Action::SNAPSHOT,
                                                  Action::OOM, Action::SEGMENT_MAP, Action::SEGMENT_UNMAP};
            if (it.action >= std::size(kActions)) continue;  // our own notes about pools
            const Note note = notes_[device].find(it.allocation_id);
            Context context = note.taken;
            Words words = note.at_taking;
            if (it.action == bfc::kFreeRequested || it.action == bfc::kFreeCompleted) {
                context = note.freed ? note.freed : note.taken;
                words = it.allocation_id < 0 ? Words{"", ""} : note.at_freeing;  // it is nobody's while it waits
            }
            if (it.action == bfc::kOom && refusal < refusals.size()) {
                context = refusals[refusal].context;
                words = refusals[refusal++].words;
            }
            entries.emplace_back(kActions[it.action], device, it.addr, it.size, address(it.stream), pool_id(it.pool), 0,
                                 keeps ? context : nullptr, words.compiling, words.metadata);
            entries.back().time_.t_ = it.time_us;
        }
        add_who_did_it(entries, device);
        for (auto& it : notes_[device].annotations()) entries.push_back(std::move(it));
        std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.time_.t_ < b.time_.t_; });
        return entries;
    }

    // What came or went for a request is of that, whose entry follows, or of the emptying of the cache or the snapshot that
    // was made then: segments, and frees that had waited for a stream, which have no words yet.
    void add_who_did_it(std::vector<TraceEntry>& entries, DeviceIndex device) {
        const auto doings = notes_[device].doings();
        auto doing = doings.rbegin();
        Refusal next;
        for (auto it = entries.rbegin(); it != entries.rend(); ++it) {
            if (it->action_ == Action::ALLOC || it->action_ == Action::OOM)
                next = {it->context_, {it->compile_context_, it->user_metadata_}};
            const bool comes = it->action_ == Action::SEGMENT_ALLOC || it->action_ == Action::SEGMENT_MAP;
            const bool goes = it->action_ == Action::SEGMENT_FREE || it->action_ == Action::SEGMENT_UNMAP;
            if (!comes && !goes && it->action_ != Action::SNAPSHOT && !it->compile_context_.empty()) continue;
            while (doing != doings.rend() && doing->from_us > it->time_.t_) ++doing;
            const bool is_found = !comes && doing != doings.rend() && it->time_.t_ <= doing->to_us;
            if (it->action_ != Action::SNAPSHOT) it->context_ = is_found ? doing->context : next.context;
            const Words& words = is_found ? doing->words : next.words;
            it->compile_context_ = words.compiling;
            it->user_metadata_ = words.metadata;
        }
    }

    std::vector<Checkpoint::Block> live_in(DeviceIndex device, const MempoolId_t& pool) {
        std::vector<Checkpoint::Block> live;
        if (!is_open(device)) return live;
        const Rows rows = read_rows(device, false);
        each_region(rows, [&](const bfc::RegionRow& region, const bfc::ChunkRow* begin, const bfc::ChunkRow* end) {
            if (pool_id(region.pool) != pool) return;
            for (const auto* chunk = begin; chunk != end; ++chunk)
                if (chunk->state == bfc::kRowInUse)
                    live.push_back({chunk->ptr, chunk->requested_size, static_cast<cudaStream_t>(address(region.stream))});
        });
        return live;
    }

    // Those of pinned memory, and of what only PyTorch's own allocator does, are as PyTorch has read them.
    static void set_settings(AllocatorConfigInfo& to) {
        to = {};
        to.pinned_num_register_threads = CUDAAllocatorConfig::pinned_num_register_threads();
        to.pinned_use_host_register = CUDAAllocatorConfig::pinned_use_cuda_host_register();
        to.release_lock_on_malloc = CUDAAllocatorConfig::release_lock_on_cudamalloc();
        to.graph_capture_record_stream_reuse = CUDAAllocatorConfig::graph_capture_record_stream_reuse();
#if TORCH_VERSION_MINOR >= 13
        to.max_round_threshold = c10::CachingAllocator::AcceleratorAllocatorConfig::pinned_max_round_threshold();
        to.max_cached_size = c10::CachingAllocator::AcceleratorAllocatorConfig::pinned_max_cached_size();
#endif
        ask("settings", [&](PyObject* it) {
            to.garbage_collection_threshold = PyFloat_AsDouble(PyTuple_GET_ITEM(it, 0));
            to.max_split_size = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(it, 1));
            to.expandable_segments = PyObject_IsTrue(PyTuple_GET_ITEM(it, 2));
            to.last_allocator_settings = PyUnicode_AsUTF8(PyTuple_GET_ITEM(it, 3));
            PyObject* divisions = PyTuple_GET_ITEM(it, 4);
            for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(divisions); ++i)
                to.roundup_power2_divisions.push_back(PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(divisions, i)));
        }, nullptr);
    }
#if TORCH_VERSION_MINOR >= 13
    static void fill_newer(DeviceStats& to, DeviceIndex device) {
        ask("newer_stats", [&](PyObject* it) {  // the rejections; then by pool its id, and 12 numbers
            to.num_oom_rejections = PyLong_AsLongLong(PyTuple_GET_ITEM(it, 0));
            auto at = [&](Py_ssize_t i) { return PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(it, i)); };
            for (Py_ssize_t i = 1; i + 14 <= PyTuple_GET_SIZE(it); i += 14) {
                auto& pool = to.reserved_bytes_by_private_pools[MempoolId_t(at(i) & ~kOurs, at(i + 1))];
                for (Py_ssize_t kind = 0; kind < 3; ++kind) {
                    auto& stat = pool[kind];
                    stat.current = at(i + 2 + 4 * kind);
                    stat.peak = at(i + 3 + 4 * kind);
                    stat.allocated = at(i + 4 + 4 * kind);
                    stat.freed = at(i + 5 + 4 * kind);
                }
            }
        }, "i", int(device));
    }
#else
    static void fill_newer(DeviceStats&, DeviceIndex) {}
#endif

#if TORCH_VERSION_MINOR < 13
    using OomRejectionObserver = OutOfMemoryObserver;
#endif
    std::mutex lock_;  // of the lists below; Python is never called with it, nor PyTorch, but for a filter
    std::vector<Scope> scopes_;
    std::vector<OutOfMemoryObserver> observers_;
    std::vector<OomRejectionObserver> rejection_observers_;
    std::vector<AllocatorTraceTracker> trackers_;
    std::vector<c10::CachingDeviceAllocator::AnnotationEntry> annotations_;
    std::atomic<size_t> open_scopes_{0};
    bfc::shared::Exports exports_;
    Notes notes_[kDevices];
    Told told_[kDevices];
    std::atomic<CreateContextFn> recorder_{nullptr};
    std::atomic<RecordContext> when_{RecordContext::NEVER};
    std::atomic<bool> recording_{false}, tracked_{false}, watched_{false};
    std::atomic<bool> opened_[kDevices]{};
    int devices_ = 0;
    pid_t process_ = 0;  // that has initialised CUDA
    bool initialized_ = false, enabled_ = true;
};

Whole* whole;  // never destroyed: PyTorch frees tensors as the process ends
void free_memory(void* ptr) noexcept { whole->give(ptr); }

// -- the module --------------------------------------------------------------------------------------

// serve(capsule, books): from then on, for good.
PyObject* serve(PyObject*, PyObject* arguments) {
    PyObject *capsule, *given;
    if (!PyArg_ParseTuple(arguments, "OO", &capsule, &given)) return nullptr;
    const auto* found = static_cast<const bfc_allocator*>(PyCapsule_GetPointer(capsule, BFC_ALLOCATOR_CAPSULE));
    if (!found) return nullptr;
    try {
        TORCH_CHECK(!whole, "bfc serves PyTorch in this process already");
        TORCH_CHECK(found->size >= sizeof(bfc_allocator),
                    "the compiled modules of bfc are older than its sources: build bfc again, with `pip install .`, or in a "
                    "checkout to work in with `python setup.py build_ext --inplace`");
        (void)CUDAAllocatorConfig::instance();  // reads the environment, which may name the allocator that is there still
        whole = new Whole;
        table = found;
        books = given;
        try {  // PyTorch's own door, which refuses once CUDA is in use
            torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(std::shared_ptr<CUDAAllocator>(whole, [](auto*) {}));
        } catch (...) {
            delete whole;
            whole = nullptr;
            throw;
        }
        c10::SetAllocator(c10::DeviceType::CUDA, whole, 1);  // torch.accelerator asks there
    } catch (const c10::Error& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
        return nullptr;
    }
    table->follow_streams(table->self, [](int device) {
        return handle(c10::cuda::getCurrentCUDAStream(static_cast<DeviceIndex>(device)));
    });
    table->retain(table->self);
    Py_INCREF(books);
    Py_RETURN_NONE;
}

// Whether PyTorch's allocator is still this one.
PyObject* is_serving(PyObject*, PyObject*) { return PyBool_FromLong(whole && allocator.load() == whole); }

PyMethodDef methods[] = {{"serve", serve, METH_VARARGS, nullptr},
                         {"is_serving", is_serving, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_bfc_torch_cuda", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
}  // namespace

PyMODINIT_FUNC PyInit__bfc_torch_cuda() {
    PyObject* made = PyModule_Create(&module);
    if (made && PyModule_AddStringConstant(made, "torch", TORCH_VERSION)) Py_CLEAR(made);
    return made;
}
